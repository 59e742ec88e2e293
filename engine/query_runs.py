"""What attention is asked: runs of rows over paged slots, and who sees whom (design §2). Knows no weights and no kernels.

Slots are ordered by position and dense. Under `speed` the upper layers hold α anchors and then the decode tokens, so a slot's
position is the slot itself below α and the slot plus a constant gap from α on. Every mask follows from that.
"""

from dataclasses import dataclass

import torch

from shoal.placement.blocks import BlockIds


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """How slots of one table map to positions."""

    num_anchors: int = 0  # slots below this hold their own position
    gap: int = 0  # slots from there on hold position slot + gap
    sink: bool = False  # anchors stay visible beyond a sliding window

    def first_visible_slot(self, slot: int, window: int | None) -> int:
        """The lowest slot that the row at `slot` sees in a layer with this window."""
        if window is None or self.sink:
            return 0
        position = slot if slot < self.num_anchors else slot + self.gap
        oldest = max(0, position - window + 1)
        return oldest if oldest < self.num_anchors else max(self.num_anchors, oldest - self.gap)


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive rows of one request that attend to slots 0 … start_slot + num_rows − 1 of one table: causally, or all of them
    to all (an image whose tokens see each other, or what is left of it)."""

    first_row: int  # in the stage's q
    num_rows: int
    start_slot: int  # of the first row
    block_ids: BlockIds  # [layers of the stage, blocks]
    geometry: SlotGeometry
    is_causal: bool = True

    @property
    def num_slots(self) -> int:
        return self.start_slot + self.num_rows

    def first_visible_slot(self, window: int | None) -> int:
        """The lowest slot any row of the run sees in a layer with this window."""
        return self.geometry.first_visible_slot(self.start_slot, window)

    def needs_mask_beyond_causal(self, window: int | None) -> bool:
        """Whether the window hides, from some row, a slot that a causal mask would show, or the run is not causal."""
        if not self.is_causal:
            return True
        if window is None:
            return False
        last = self.num_slots - 1
        last_position = last if last < self.geometry.num_anchors else last + self.geometry.gap
        return last_position - window + 1 > 0


def visible(runs: list[QueryRun], first_slots: list[int], num_keys: int, window: int | None) -> torch.Tensor:
    """Who sees whom, for runs of equal length n and keys at slots first, first + 1, …: bool [runs, n, num_keys]."""

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values).view(-1, 1, 1)

    queries = column([run.start_slot for run in runs]) + torch.arange(runs[0].num_rows).view(1, -1, 1)
    keys = column(first_slots) + torch.arange(num_keys).view(1, 1, -1)
    last = column([run.num_slots - 1 for run in runs])
    seen = keys <= torch.where(torch.tensor([run.is_causal for run in runs]).view(-1, 1, 1), queries, last)
    if window is not None:
        alpha, gap = column([r.geometry.num_anchors for r in runs]), column([r.geometry.gap for r in runs])
        sink = torch.tensor([r.geometry.sink for r in runs]).view(-1, 1, 1)
        distance = (queries + gap * (queries >= alpha)) - (keys + gap * (keys >= alpha))
        seen &= (distance < window) | (sink & (keys < alpha))
    return seen
