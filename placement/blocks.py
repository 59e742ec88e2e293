"""Who owns which block of a worker's KV pool. A block is `block_size` tokens × one layer's K and V. Knows no tensors.

Invariant: free + owned = total after every call; allocation is all or nothing.
"""

import numpy as np
from numpy.typing import NDArray

from shoal.errors import CapacityExceeded, InternalError

BlockIds = NDArray[np.int32]


class BlockPool:
    """A reference-counted pool of blocks 0 … num_blocks − 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: BlockIds = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack; the top is at num_free − 1
        self._num_free = num_blocks
        self._owners = np.zeros(num_blocks, dtype=np.int32)
        self._places = np.zeros(num_blocks, dtype=np.int32)  # scratch of `_check_owned`

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    def allocate(self, count: int) -> BlockIds:
        """Take `count` blocks with one owner each. Raises CapacityExceeded and takes none when fewer are free."""
        if count < 0:
            raise InternalError(f"asked for {count} KV blocks")
        if count > self._num_free:
            raise CapacityExceeded(f"{count} KV blocks needed, {self._num_free} of {self.num_blocks} free; retry later")
        ids = self._free[self._num_free - count : self._num_free][::-1].copy()  # rising: neighbours in memory, in reading order
        self._num_free -= count
        self._owners[ids] = 1
        return ids

    def retain(self, ids: BlockIds) -> None:
        """Add an owner to each block. Raises InternalError, and changes nothing, unless ids are distinct and owned."""
        self._check_owned(ids, "retained")
        self._owners[ids] += 1

    def release(self, ids: BlockIds) -> None:
        """Drop one owner of each block; blocks without owners become free. Raises InternalError as `retain` does."""
        self._check_owned(ids, "released")
        self._owners[ids] -= 1
        freed = ids[self._owners[ids] == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

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
        """Raise InternalError unless free + owned = total and no free block has an owner."""
        free = self._free[: self._num_free]
        if len(np.unique(free)) != self._num_free or np.any(self._owners[free]):
            raise InternalError("a free KV block is listed twice or has an owner")
        if int(np.count_nonzero(self._owners)) + self._num_free != self.num_blocks:
            raise InternalError("free + owned KV blocks differ from the pool's total")
