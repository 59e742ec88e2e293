"""Cuts a step into stages: ranges of layers in which the same rows do the same thing. Knows segments, no weights.

Every index that layers share is made here once: which rows are active, where their K and V go, who attends to what.
Rows of a step are its segments' tokens in order, each segment contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.engine.query_runs import QueryRun, SlotGeometry
from shoal.engine.segment import Segment
from shoal.engine.vision.prompt_images import PromptImages
from shoal.errors import InternalError
from shoal.placement.blocks import BlockIds
from shoal.visibility import VisibilityKind


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are active in a stage, and where they write."""

    rows: torch.Tensor | None  # [n] of the step's rows; None = all of them
    blocks: torch.Tensor  # [layers, n] block of each row
    offsets: torch.Tensor  # [n] slot within the block


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers in which `full` rows run everything and `kv_only` rows only leave K and V."""

    layers: range
    full: RowGroup | None
    kv_only: RowGroup | None
    runs: tuple[QueryRun, ...]  # of the full rows


def row_ranges(segments: Sequence[Segment]) -> list[range]:
    """The step's rows of each segment."""
    ends = np.cumsum([0, *(len(segment.positions) for segment in segments)]).tolist()
    return [range(start, stop) for start, stop in pairwise(ends)]


def plan_stages(segments: Sequence[Segment], device: torch.device) -> list[Stage]:
    """The stages of a step, lowest layer first; layers in which no row is active are left out."""
    ranges = row_ranges(segments)
    cuts: set[int] = set()
    for s in segments:
        cuts |= {s.layers.start, s.layers.stop, s.kv_only_layers.start, s.kv_only_layers.stop}
        cuts.add(s.kv.layout.lower_layers.stop)
        cuts |= set(range(s.num_deep_layers + 1))
    stages = []
    for start, stop in pairwise(sorted(cuts)):
        full = [(s, r) for s, r in zip(segments, ranges, strict=True) if start in s.layers]
        kv_only = [(s, r) for s, r in zip(segments, ranges, strict=True) if start in s.kv_only_layers]
        if full or kv_only:
            layers, num_rows = range(start, stop), ranges[-1].stop
            stages.append(
                Stage(
                    layers,
                    full=_row_group(full, layers, num_rows, device),
                    kv_only=_row_group(kv_only, layers, num_rows, device),
                    runs=tuple(_query_runs([s for s, _ in full], layers)),
                )
            )
    return stages


def _block_ids(segment: Segment, layers: range) -> BlockIds:
    table = segment.kv.lower if segment.kv.is_lower(layers.start) else segment.kv.upper
    ids: BlockIds = table.ids[layers.start - table.layers.start : layers.stop - table.layers.start]
    return ids


def _row_group(active: list[tuple[Segment, range]], layers: range, num_rows: int, device: torch.device) -> RowGroup | None:
    if not active:
        return None
    blocks: list[BlockIds] = []
    slots: list[NDArray[np.int64]] = []
    block_size = active[0][0].kv.lower.block_size
    for segment, _ in active:
        own = segment.kv.slots(layers.start, segment.positions)
        ids = _block_ids(segment, layers)
        if own.stop > ids.shape[1] * block_size:
            raise InternalError(f"slot {own.stop - 1} is not reserved at layer {layers.start}: {ids.shape[1]} blocks")
        slots.append(np.arange(own.start, own.stop))
        blocks.append(ids[:, slots[-1] // block_size])
    total = sum(len(r) for _, r in active)
    rows = None if total == num_rows else torch.from_numpy(np.concatenate([np.arange(r.start, r.stop) for _, r in active]))
    return RowGroup(
        None if rows is None else rows.to(device),
        torch.from_numpy(np.concatenate(blocks, axis=1).astype(np.int64)).to(device),
        torch.from_numpy(np.concatenate(slots) % block_size).to(device),
    )


def _query_runs(full: list[Segment], layers: range) -> list[QueryRun]:
    """One run per segment; neighbours that continue one another in the same table become one. Images whose tokens see each other
    are cut out as runs of their own."""
    runs: list[QueryRun] = []
    images: dict[int, PromptImages] = {}  # by the first row of a run
    first_row, previous = 0, None
    for segment in full:
        slots = segment.kv.slots(layers.start, segment.positions)
        run = QueryRun(first_row, len(slots), slots.start, _block_ids(segment, layers), slot_geometry(segment, layers.start))
        if previous is not None and previous.kv is segment.kv and runs[-1].num_slots == slots.start:
            last = runs.pop()
            run = QueryRun(last.first_row, last.num_rows + len(slots), last.start_slot, last.block_ids, last.geometry)
        runs.append(run)
        if segment.kv.images is not None and segment.kv.is_lower(layers.start):  # there slot = position
            images[run.first_row] = segment.kv.images
        first_row, previous = first_row + len(slots), segment
    if not images:
        return runs
    return [piece for run in runs for piece in (_cut(run, images[run.first_row]) if run.first_row in images else [run])]


def _cut(run: QueryRun, images: PromptImages) -> list[QueryRun]:
    return [
        replace(
            run,
            first_row=run.first_row + slots.start - run.start_slot,
            num_rows=len(slots),
            start_slot=slots.start,
            is_causal=is_causal,
        )
        for slots, is_causal in images.pieces(range(run.start_slot, run.num_slots))
    ]


def slot_geometry(segment: Segment, layer: int) -> SlotGeometry:
    """How slots of the segment's table at `layer` map to positions."""
    layout = segment.kv.layout
    if segment.kv.is_lower(layer) or layout.visibility.kind is not VisibilityKind.SPEED:
        return SlotGeometry()
    anchors = layout.split.num_anchor_tokens
    return SlotGeometry(anchors, layout.split.num_prefill_tokens - anchors, layout.visibility.sink)
