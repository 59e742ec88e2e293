"""Which plan entries are complete as layers and chunks finish. Knows counts only: no tensors, no transfer, no clock.

Chunks of a request run in order of position, and a chunk finishes its layers from the bottom up. So the entries of one layer
complete in order of `stop`, however chunks and wire entries are cut.
"""

from collections import deque
from itertools import takewhile

from shoal.placement.plan import Entry, EntryKind, TransferPlan


class ExportTracker:
    """Progress of one request's transfer plan on the prefill side. Every entry is reported complete exactly once."""

    def __init__(self, plan: TransferPlan) -> None:
        self._kv: dict[int, deque[Entry]] = {}
        self._deep_states: deque[Entry] = deque()
        for entry in plan.entries:
            if entry.kind is EntryKind.KV:
                self._kv.setdefault(entry.layer, deque()).append(entry)
            else:
                self._deep_states.append(entry)

    def layers_written(self, layers: range, stop: int) -> list[int]:
        """KV of tokens 0 … stop − 1 is in the pool at these layers: indices of the entries this completes."""
        return [index for layer in layers if layer in self._kv for index in _take(self._kv[layer], stop)]

    def num_bytes_at(self, layer: int, stop: int) -> int:
        """What will be complete at this layer alone once KV of tokens 0 … stop − 1 is there."""
        return sum(entry.num_bytes for entry in takewhile(lambda entry: entry.stop <= stop, self._kv.get(layer, ())))

    def states_kept(self, stop: int) -> list[int]:
        """The deep states of all tokens below `stop` that have any are kept: indices of the entries this completes."""
        return _take(self._deep_states, stop)

    @property
    def num_pending(self) -> int:
        """Entries not yet reported complete."""
        return len(self._deep_states) + sum(map(len, self._kv.values()))


def _take(entries: deque[Entry], stop: int) -> list[int]:
    complete: list[int] = []
    while entries and entries[0].stop <= stop:
        complete.append(entries.popleft().index)
    return complete
