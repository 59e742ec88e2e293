"""What each chunk of a prompt adds to its transfer, and when. Knows counts per layer; knows no flow and no time.

Placement's counts say what crosses; here they are split over chunks, and a test holds the sums equal.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from shoal.placement.arithmetic import num_deep_states, shipped_kv_layers
from shoal.simulator.step_cost import StepCost
from shoal.visibility import PromptSplit


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Payload of one chunk: `early` leaves while later layers compute, `last` is ready only when the chunk is done."""

    early_bytes: float
    last_bytes: float
    num_messages: int


@dataclass(frozen=True)
class Shipments:
    """Transfers of one model under one visibility from one kind of worker."""

    cost: StepCost

    def chunk(self, split: PromptSplit, start: int, stop: int, num_cached: int = 0) -> ChunkBytes:
        """Tokens [start, stop) of a prompt: layers 0 … K−2 early; layer K−1, upper KV (`pop`) and deep states last.

        Decode holds the first `num_cached`, and start is not before them.
        """
        model = self.cost.model
        token_bytes = model.kv_token_bytes * self.cost.machine.replication(model)
        early, num_early = self._tokens(self._early_windows, split, start, stop)
        last, num_last = self._tokens(self._last_windows, split, start, stop)
        states = self._num_states(split, start, stop, num_cached)
        state_bytes = states * model.shape.hidden_size * model.hidden_bytes
        return ChunkBytes(early * token_bytes, last * token_bytes + state_bytes, num_early + num_last + (states > 0))

    def _tokens(self, windows: tuple[tuple[int | None, int], ...], split: PromptSplit, start: int, stop: int) -> tuple[int, int]:
        """(layer-tokens, layers that ship any)."""
        total = layers = 0
        for window, count in windows:
            first = 0 if window is None else max(0, split.num_prefill_tokens - (window - 1))
            tokens = max(0, stop - max(start, first))
            total += count * tokens
            layers += count if tokens else 0
        return total, layers

    def _num_states(self, split: PromptSplit, start: int, stop: int, num_cached: int) -> int:
        shape, visibility = self.cost.model.shape, self.cost.visibility
        num_states = num_deep_states(shape, visibility, split.num_prompt_tokens, num_cached)
        end = split.num_prefill_tokens if visibility.late else split.num_anchor_tokens
        return max(0, min(stop, end) - max(start, end - num_states))

    @cached_property
    def _early_windows(self) -> tuple[tuple[int | None, int], ...]:
        return self._counted(range(self.cost.depth - 1))

    @cached_property
    def _last_windows(self) -> tuple[tuple[int | None, int], ...]:
        return self._counted(range(self.cost.depth - 1, shipped_kv_layers(self.cost.model.shape, self.cost.visibility).stop))

    def _counted(self, layers: range) -> tuple[tuple[int | None, int], ...]:
        return tuple(Counter(self.cost.model.shape.window(layer) for layer in layers).items())
