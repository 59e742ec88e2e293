"""Deep states parked in blocks of the KV pool: no memory beyond the pool's budget. Knows bytes of blocks; owns none of them."""

import numpy as np
import torch

from shoal.engine.kv_pool import KvPool
from shoal.placement.blocks import BlockIds
from shoal.placement.plan import EntryKind, TransferPlan


def num_state_blocks(num_tokens: int, hidden_size: int, block_elements: int) -> int:
    """Blocks that hold the hidden states of `num_tokens` tokens; a block has room for `block_elements` numbers."""
    return -(-num_tokens * hidden_size // block_elements)


def state_range(plan: TransferPlan) -> range:
    """The tokens whose deep states a plan ships; empty when it ships none."""
    states = [entry for entry in plan.entries if entry.kind is EntryKind.DEEP_STATE]
    return range(states[0].start, states[-1].stop) if states else range(0)


class StateStore:
    """Hidden states of consecutive positions, laid end to end over the given blocks. Ranges may be written in any order.

    Different threads may use different ranges at the same time, as with slots of the pool.
    """

    def __init__(self, pool: KvPool, block_ids: BlockIds, positions: range, hidden_size: int) -> None:
        self.positions = positions
        self._hidden_size = hidden_size
        self._blocks = pool.data.view(pool.data.shape[0], -1)  # [num_blocks, block_elements]
        self._ids = [int(block) for block in block_ids]
        if len(self._ids) < num_state_blocks(len(positions), hidden_size, self._blocks.shape[1]):
            raise ValueError(f"{len(self._ids)} blocks cannot hold the states of {len(positions)} tokens")

    @property
    def block_ids(self) -> BlockIds:
        """Where the states are."""
        return np.array(self._ids, dtype=np.int32)

    def write(self, start: int, states: torch.Tensor) -> None:
        """Keep `states` [n, h] of positions start … start + n − 1."""
        source = states.reshape(-1)
        for part, done in self._parts(start, start + states.shape[0]):
            part.copy_(source[done : done + part.numel()])

    def read_into(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy the states of positions start … stop − 1 to `out`, a contiguous tensor of as many elements."""
        target = out.view(-1)
        for part, done in self._parts(start, stop):
            target[done : done + part.numel()].copy_(part)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A copy [n, h] of the states of positions start … stop − 1."""
        out = torch.empty(stop - start, self._hidden_size, dtype=self._blocks.dtype, device=self._blocks.device)
        self.read_into(start, stop, out)
        return out

    def _parts(self, start: int, stop: int) -> list[tuple[torch.Tensor, int]]:
        """The stored range as (view into one block, number of elements before it)."""
        if not self.positions.start <= start <= stop <= self.positions.stop:
            raise ValueError(f"positions {start}…{stop} lie outside {self.positions}")
        size = self._blocks.shape[1]
        first = (start - self.positions.start) * self._hidden_size
        last = (stop - self.positions.start) * self._hidden_size
        parts: list[tuple[torch.Tensor, int]] = []
        at = first
        while at < last:
            block, offset = divmod(at, size)
            length = min(size - offset, last - at)
            parts.append((self._blocks[self._ids[block], offset : offset + length], at - first))
            at += length
        return parts
