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
    num_decode_cached: int = 0  # c: found in the decode worker's
    is_local: bool = False  # its decode worker runs the prompt too
    num_retries: int = 0
    attempt: int = 0  # events of earlier ones are void
    num_preempted: int = 0
    num_replayed: int = 0  # tokens generated on workers that are gone: run again as decode tokens
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

    def begin_again(self, num_generated: int, *, is_preempted: bool = False) -> None:
        """Forget the workers that had it. A key of its own tells the attempt's chunks from those of the one before."""
        self.attempt += 1
        self.num_retries += not is_preempted
        self.num_preempted += is_preempted
        self.num_replayed = num_generated
        self.key = f"{self.index}.{self.attempt}"
        self.decode = self.prefill = self.flow = None
        self.num_cached_tokens = self.num_decode_cached = 0
        self.reserved_s = self.prefill_end_s = self.delivered_s = None

    @property
    def num_known_tokens(self) -> int:
        """Prompt and replayed tokens: what is run before the next one is sampled."""
        return self.split.num_prompt_tokens + self.num_replayed

    @property
    def num_prompt_tokens(self) -> int:
        return self.split.num_prompt_tokens

    @property
    def num_prefill_tokens(self) -> int:
        return self.split.num_prefill_tokens
