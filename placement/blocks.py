"""Who owns which block of a worker's KV pool. A block is `block_size` tokens × one layer's K and V. Knows no tensors.

A prefix cache may be one of a block's owners. A block that nobody else owns is *cached*: it holds what a later request may use,
and is given up as soon as an allocation needs it. Invariant: free + cached + used = total after every call; allocation is all
or nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.errors import CapacityExceeded, InternalError

BlockIds = NDArray[np.int32]
NO_BLOCK = -1  # in a table or a cached prefix: what a sliding window hides from every query to come is held no more


def held(ids: BlockIds) -> BlockIds:
    """Those that are there, flat."""
    flat = ids.reshape(-1)
    there: BlockIds = flat[flat != NO_BLOCK]
    return there


class BlockPool:
    """A reference-counted pool of blocks 0 … num_blocks − 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: BlockIds = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack; the top is at num_free − 1
        self._num_free = num_blocks
        self._owners = np.zeros(num_blocks, dtype=np.int32)
        self._places = np.zeros(num_blocks, dtype=np.int32)  # scratch of `_check_owned`
        self._kept = np.zeros(num_blocks, dtype=np.bool_)  # by the prefix cache, which counts as one owner
        self._num_cached = 0  # kept, and owned by nobody else
        self._give_up: Callable[[int], None] = _nothing_to_give_up

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix cache owns."""
        return self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that an allocation may have: free ones, and cached ones, which are given up for it."""
        return self._num_free + self._num_cached

    @property
    def num_used(self) -> int:
        """Blocks that a request owns."""
        return self.num_blocks - self._num_free - self._num_cached

    def allocate(self, count: int) -> BlockIds:
        """Take `count` blocks with one owner each. Raises CapacityExceeded and takes none when fewer are available."""
        if count < 0:
            raise InternalError(f"asked for {count} KV blocks")
        if count > self.num_available:
            raise CapacityExceeded(f"{count} KV blocks needed, {self.num_available} of {self.num_blocks} free; retry later")
        if count > self._num_free:
            self._give_up(count - self._num_free)
        if count > self._num_free:
            raise InternalError(f"the prefix cache gave up too little: {count} KV blocks needed, {self._num_free} free")
        ids = self._free[self._num_free - count : self._num_free][::-1].copy()  # rising: neighbours in memory, in reading order
        self._num_free -= count
        self._owners[ids] = 1
        return ids

    def retain(self, ids: BlockIds) -> None:
        """Add an owner to each block. Raises InternalError, and changes nothing, unless ids are distinct and owned."""
        self._check_owned(ids, "retained")
        self._num_cached -= self.count_cached(ids)
        self._owners[ids] += 1

    def release(self, ids: BlockIds) -> None:
        """Drop one owner of each block; blocks without owners become free. Raises InternalError as `retain` does."""
        self._check_owned(ids, "released")
        self._owners[ids] -= 1
        self._num_cached += self.count_cached(ids)
        freed = ids[self._owners[ids] == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def count_cached(self, ids: BlockIds) -> int:
        """How many of these blocks only the prefix cache owns."""
        return int(np.count_nonzero(self._kept[ids] & (self._owners[ids] == 1)))

    def counts_cached(self, groups: Sequence[BlockIds]) -> NDArray[np.int64]:
        """Of each group, how many blocks only the prefix cache owns; NO_BLOCK is none."""
        ids = np.concatenate(groups)
        are_cached = self._kept[ids] & (self._owners[ids] == 1) & (ids != NO_BLOCK)
        sums = np.concatenate([[0], np.cumsum(are_cached)])
        stops = np.cumsum([len(group) for group in groups])
        counts: NDArray[np.int64] = np.diff(sums[np.concatenate([[0], stops])])
        return counts

    def serve(self, give_up: Callable[[int], None]) -> None:
        """Let a prefix cache own blocks. `give_up(count)` must free at least so many of its cached blocks with `let_go`."""
        self._give_up = give_up

    def keep(self, ids: BlockIds) -> None:
        """The prefix cache becomes an owner of blocks that a request owns. Raises InternalError when it is one already."""
        self.retain(ids)
        if np.any(self._kept[ids]):
            raise InternalError("a KV block is kept twice by the prefix cache")
        self._kept[ids] = True

    def let_go(self, ids: BlockIds) -> None:
        """The prefix cache no longer owns these blocks. Raises InternalError unless it did."""
        if not np.all(self._kept[ids]):
            raise InternalError("the prefix cache let go of a KV block that it did not keep")
        self._num_cached -= self.count_cached(ids)
        self._kept[ids] = False
        self.release(ids)

    def _check_owned(self, ids: BlockIds, verb: str) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_blocks:
            raise InternalError(f"{verb} a KV block that does not exist")
        if np.any(self._owners[ids] < 1):
            raise InternalError(f"{verb} a free KV block")
        places = np.arange(len(ids), dtype=np.int32)
        self._places[ids] = places  # of equal ids one place stays: distinct or not, without sorting
        if np.any(self._places[ids] != places):
            raise InternalError(f"{verb} a KV block twice in one call")

    def check(self) -> None:
        """Raise InternalError unless free + cached + used = total and no free block has an owner."""
        free = self._free[: self._num_free]
        if len(np.unique(free)) != self._num_free or np.any(self._owners[free]) or np.any(self._kept[free]):
            raise InternalError("a free KV block is listed twice or has an owner")
        if int(np.count_nonzero(self._kept & (self._owners == 1))) != self._num_cached:
            raise InternalError("cached KV blocks differ from their count")
        if int(np.count_nonzero(self._owners)) + self._num_free != self.num_blocks:
            raise InternalError("free + owned KV blocks differ from the pool's total")


def _nothing_to_give_up(count: int) -> None:
    raise InternalError(f"{count} KV blocks are to be given up, and there is no prefix cache")
