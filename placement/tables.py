"""Where a request's tokens live: layout (which layers, which slots) and block tables. Knows counts and ids, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import InternalError
from shoal.placement.blocks import NO_BLOCK, BlockIds, BlockPool, held
from shoal.visibility import PromptSplit, Visibility, VisibilityKind


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The geometry of one request's KV under a resolved visibility (design §2, §4).

    In lower layers slot = position. In upper layers `speed` is dense: α anchors, then the decode tokens.
    """

    num_layers: int  # L
    visibility: Visibility
    split: PromptSplit

    @classmethod
    def of(cls, num_layers: int, visibility: Visibility, num_prompt_tokens: int) -> "KvLayout":
        return cls(num_layers, visibility, visibility.split(num_prompt_tokens))

    @property
    def lower_layers(self) -> range:
        return range(self.visibility.depth(self.num_layers))

    @property
    def upper_layers(self) -> range:
        return range(self.visibility.depth(self.num_layers), self.num_layers)

    def upper_slot(self, position: int) -> int:
        """The upper slot of a visible position (an anchor or a decode token, under `speed`)."""
        if self.visibility.kind is not VisibilityKind.SPEED or position < self.split.num_anchor_tokens:
            return position
        if position < self.split.num_prefill_tokens:
            raise InternalError(f"position {position} is not visible in upper layers under {self.visibility}")
        return self.split.num_anchor_tokens + position - self.split.num_prefill_tokens

    def num_upper_slots(self, num_tokens: int) -> int:
        """Upper slots when positions 0 … num_tokens − 1 (num_tokens ≥ P) have been run by decode."""
        if not self.upper_layers:
            return 0
        if self.visibility.kind is VisibilityKind.SPEED:
            return self.split.num_anchor_tokens + num_tokens - self.split.num_prefill_tokens
        return num_tokens


class BlockTable:
    """Blocks of one visible set of one request. `ids[layer − layers.start, slot // block_size]` is the block of a slot, or
    NO_BLOCK where no query to come sees it (`RequestTables.drop_hidden`)."""

    def __init__(self, layers: range, block_size: int) -> None:
        self.layers = layers
        self.block_size = block_size
        self.ids: BlockIds = np.empty((len(layers), 0), dtype=np.int32)

    @property
    def num_slots(self) -> int:
        """Slots the table has room for."""
        return int(self.ids.shape[1]) * self.block_size

    def num_missing_blocks(self, num_slots: int) -> int:
        """Blocks to allocate so that `num_slots` fit."""
        return len(self.layers) * max(0, -(-num_slots // self.block_size) - int(self.ids.shape[1]))

    def extend(self, ids: BlockIds) -> None:
        """Append blocks, the same number for each layer."""
        self.ids = np.concatenate([self.ids, ids.reshape(len(self.layers), -1)], axis=1)

    def layer_ids(self, layer: int) -> BlockIds:
        """Block ids of one layer, in slot order."""
        ids: BlockIds = self.ids[layer - self.layers.start]
        return ids


class RequestTables:
    """The `lower` and `upper` tables of one request, owned until `release`."""

    def __init__(self, pool: BlockPool, block_size: int, layout: KvLayout) -> None:
        self.layout = layout
        self.lower = BlockTable(layout.lower_layers, block_size)
        self.upper = BlockTable(layout.upper_layers, block_size)
        self._pool = pool

    def share(self, blocks: BlockIds) -> None:
        """Begin with the whole blocks of a cached prefix, [layers, blocks]: of the lower layers, or of these and the upper ones.

        They become this request's too, and are never written: `reserve` adds what it writes.
        """
        if self.lower.ids.size or self.upper.ids.size:
            raise InternalError("a cached prefix comes first in a request's tables")
        self._pool.retain(held(blocks))
        num_lower = len(self.lower.layers)
        self.lower.ids = blocks[:num_lower].copy()
        if len(blocks) > num_lower:
            self.upper.ids = blocks[num_lower:].copy()

    def reserve(self, num_lower_slots: int, num_upper_slots: int) -> None:
        """Make room for so many slots in all. Raises CapacityExceeded and changes nothing when the pool is short."""
        num_lower = self.lower.num_missing_blocks(num_lower_slots)
        num_upper = self.upper.num_missing_blocks(num_upper_slots)
        ids = self._pool.allocate(num_lower + num_upper)
        if num_lower:
            self.lower.extend(ids[:num_lower])
        if num_upper:
            self.upper.extend(ids[num_lower:])

    def fork(self, num_lower_slots: int, num_upper_slots: int) -> "RequestTables":
        """Tables of another answer to the same prompt, with room for so many slots: whole blocks of the prompt are shared.

        The block that the prompt fills in part is the fork's own and yet to be copied (`partial_blocks`). Raises
        CapacityExceeded and changes nothing when the pool is short.
        """
        twin = RequestTables(self._pool, self.lower.block_size, self.layout)
        num_lower, num_upper = num_fork_blocks(self.layout, self.lower.block_size, num_lower_slots, num_upper_slots)
        own = self._pool.allocate(num_lower + num_upper)
        for mine, theirs, ids in ((self.lower, twin.lower, own[:num_lower]), (self.upper, twin.upper, own[num_lower:])):
            shared = mine.ids[:, : self._num_prompt_slots(mine) // mine.block_size]
            self._pool.retain(held(shared))
            theirs.ids = shared.copy()
            if len(ids):
                theirs.extend(ids)
        return twin

    def partial_blocks(self) -> BlockIds:
        """The blocks that the prompt fills in part, of both tables: what a fork copies before its first token runs."""
        found = []
        for table in (self.lower, self.upper):
            num_whole, num_over = divmod(self._num_prompt_slots(table), table.block_size)
            found.append(table.ids[:, num_whole : num_whole + (num_over > 0)].reshape(-1))
        blocks: BlockIds = np.concatenate(found)
        return blocks

    def drop_hidden(self, windows: Sequence[int | None], position: int) -> int:
        """Give back whole blocks that no query at `position` or later sees: in window layers, all that lies w tokens or more
        behind. Returns how many. No step may be using the tables.

        Upper tables of `speed` are dense, and few, and stay; so do those of late `pop` while prompt tokens are projected.
        """
        split, visibility = self.layout.split, self.layout.visibility
        is_made = not visibility.late or position > split.num_prefill_tokens
        tables = [self.lower, self.upper] if visibility.kind is VisibilityKind.POP and is_made else [self.lower]
        dropped: list[BlockIds] = []
        for table in tables:
            for row, layer in enumerate(table.layers):
                window = windows[layer] if windows else None
                if window is not None and (num_hidden := (position - window + 1) // table.block_size) > 0:
                    dropped.append(held(table.ids[row, :num_hidden]))
                    table.ids[row, :num_hidden] = NO_BLOCK
        if not dropped:
            return 0
        gone: BlockIds = np.concatenate(dropped)
        self._pool.release(gone)
        return len(gone)

    def _num_prompt_slots(self, table: BlockTable) -> int:
        num_tokens = self.layout.split.num_prompt_tokens
        return num_tokens if table is self.lower else self.layout.num_upper_slots(num_tokens)

    def release(self) -> None:
        """Give every block back. Harmless when repeated."""
        for table in (self.lower, self.upper):
            ids, table.ids = table.ids, table.ids[:, :0]
            self._pool.release(held(ids))


def num_fork_blocks(layout: KvLayout, block_size: int, num_lower_slots: int, num_upper_slots: int) -> tuple[int, int]:
    """Blocks of its own that a further answer to the same prompt takes, in the lower and in the upper layers."""
    num_tokens = layout.split.num_prompt_tokens
    shared = num_tokens // block_size, layout.num_upper_slots(num_tokens) // block_size
    lower = len(layout.lower_layers) * max(0, -(-num_lower_slots // block_size) - shared[0])
    upper = len(layout.upper_layers) * max(0, -(-num_upper_slots // block_size) - shared[1])
    return lower, upper
