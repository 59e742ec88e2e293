"""Which leading blocks of prompts a prefill worker still has. Least recently used goes first. Knows hashes; knows no KV."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """At most `capacity` hashes. A hash stands for a block and everything before it, so hits are a leading run."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def num_hits(self, hashes: Sequence[int]) -> int:
        """Leading hashes that are here."""
        for index, value in enumerate(hashes):
            if value not in self._hashes:
                return index
        return len(hashes)

    def insert(self, hashes: Sequence[int]) -> None:
        """Keep these, the last block least dear (it goes before the ones it rests on)."""
        for value in reversed(hashes[: self._capacity]):
            self._hashes[value] = None
            self._hashes.move_to_end(value)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)
