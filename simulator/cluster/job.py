"""One request on its way through the simulated cluster, with the time of every passage. Decides nothing.

arrival ──reserved──▶ prefill start ──▶ prefill end ──delivered──▶ first token ──▶ finish
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.visibility import PromptSplit

if TYPE_CHECKING:
    from shoal.simulator.cluster.decode_node import DecodeNode
    from shoal.simulator.cluster.network import Flow
    from shoal.simulator.cluster.prefill_node import PrefillNode


@dataclass(slots=True, eq=False)
class Job:
    """Times in seconds; None until they have come."""

    key: str
    index: int
    split: PromptSplit
    num_output_tokens: int
    max_tokens: int  # what is reserved
    arrival_s: float
    prefix_hashes: tuple[int, ...] = ()
    hash_tokens: int = 512
    num_cached_tokens: int = 0  # found in the prefill worker's prefix cache
    num_retries: int = 0
    prefill_debt: int = 0  # token-layers, as the router counts what it has sent
    decode_debt: int = 0
    decode: "DecodeNode | None" = None
    prefill: "PrefillNode | None" = None
    flow: "Flow | None" = None
    reserved_s: float | None = None
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    delivered_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None
    wire_bytes: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return self.split.num_prompt_tokens

    @property
    def num_prefill_tokens(self) -> int:
        return self.split.num_prefill_tokens
