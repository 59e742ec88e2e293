"""The tensor behind a worker's blocks. Knows slots and the wire layout; who owns a block is placement's BlockPool."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from shoal.engine.dtypes import torch_dtype
from shoal.engine.kernels import kernels_or_none
from shoal.engine.kernels.memory import empty
from shoal.errors import InternalError, InvalidConfig
from shoal.placement.blocks import NO_BLOCK, BlockIds
from shoal.placement.tables import BlockTable
from shoal.types import DType, ModelShape


def block_bytes(shape: ModelShape, block_size: int, dtype: DType) -> int:
    """Bytes of one block: `block_size` tokens × one layer's K and V."""
    return shape.kv_elements * block_size * dtype.num_bytes


_MAX_RUNS: Final = 8  # of neighbouring blocks in one entry, and one more for each so many blocks
_MIN_RUN_BLOCKS: Final = 8


class KvPool:
    """`data` [num_blocks, 2, kv_heads, block_size, head_dim]; K = 0, V = 1; the rotary embedding is applied before caching.

    `pack` and `unpack` may run in a transfer thread while a step runs, on blocks that the step does not touch.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_blocks: int,
        block_size: int,
        dtype: DType,
        device: torch.device | str = "cpu",
        memory: torch.Tensor | None = None,
    ) -> None:
        """Zeroed; over `memory` [num_bytes] uint8, if given, as it is. Raises InvalidConfig when there is not so much."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        dims = (num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
        try:
            on_cpu, element = torch.device(device).type == "cpu", torch_dtype(dtype)
            if memory is not None:
                self.data = memory.view(element).view(dims)
            else:
                self.data = (empty(dims, element) if on_cpu else torch.empty(dims, dtype=element, device=device)).zero_()
        except RuntimeError as error:  # the allocator's: nothing else here can fail
            size = f"{math.prod(dims) * dtype.num_bytes / 1e9:.1f} GB"
            raise InvalidConfig(f"a KV pool of {size} cannot be allocated on {device}; lower kv_memory_bytes") from error
        self.rows = self.data.view(-1, shape.head_dim)  # one row per (block, K or V, head, slot)
        fits = on_cpu and shape.head_dim * dtype.num_bytes % 8 == 0
        self.kernels = kernels_or_none() if on_cpu else None  # without them torch copies
        self._words = self.data.view(torch.int64) if fits else None  # the same memory, 8 bytes at a time

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def write(self, kv: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Store kv [n, 2, kv_heads, head_dim] at (blocks [n], offsets [n])."""
        self.data[blocks, :, :, offsets] = kv

    def copy_blocks(self, sources: BlockIds, targets: BlockIds) -> None:
        """Copy whole blocks, pairwise: an answer takes its own copy of a block that it is about to write in. What is no longer
        held (NO_BLOCK) is left out."""
        are_held = (sources != NO_BLOCK) & (targets != NO_BLOCK)
        sources, targets = sources[are_held], targets[are_held]
        if len(sources):
            device = self.data.device
            at = [torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64)).to(device) for ids in (sources, targets)]
            self.data.index_copy_(0, at[1], self.data.index_select(0, at[0]))

    def pack(self, table: BlockTable, layer: int, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy slots [start, stop) of one layer into `out`, a uint8 tensor on any device, as [n, 2, kv_heads, head_dim]."""
        if self._copy_slots(table, layer, start, stop, out, to_wire=True):
            return
        if runs := self._runs(table, layer, start, stop, out):
            for mine, wire in runs:
                wire.copy_(mine)
            return
        rows = self._row_index(table, layer, start, stop)
        view = self._wire_view(out, len(rows))
        if view.device == self.data.device:
            torch.index_select(self.rows, 0, rows, out=view)
        else:
            view.copy_(torch.index_select(self.rows, 0, rows))

    def unpack(self, table: BlockTable, layer: int, start: int, stop: int, data: torch.Tensor) -> None:
        """Copy `data`, a uint8 tensor in the wire layout on any device, into slots [start, stop) of one layer."""
        if self._copy_slots(table, layer, start, stop, data, to_wire=False):
            return
        if runs := self._runs(table, layer, start, stop, data):
            for mine, wire in runs:
                mine.copy_(wire)
            return
        rows = self._row_index(table, layer, start, stop)
        self.rows.index_copy_(0, rows, self._wire_view(data, len(rows)).to(self.data.device))

    def _copy_slots(self, table: BlockTable, layer: int, start: int, stop: int, wire: torch.Tensor, *, to_wire: bool) -> bool:
        """Copy by the compiled kernel, wherever the blocks lie. False, and nothing copied, where it cannot be used."""
        fits = wire.device.type == "cpu" and wire.is_contiguous() and 0 <= start < stop <= table.num_slots
        if self.kernels is None or not fits:
            return False
        self._wire_view(wire, (stop - start) * 2 * self.shape.num_kv_heads)  # refuses a wrong size
        ids = np.ascontiguousarray(self._blocks_of(table, layer, start, stop), np.int32)
        self.kernels.copy_slots(self.data, wire, ids, range(start, stop), to_wire=to_wire)
        return True

    def _runs(
        self, table: BlockTable, layer: int, start: int, stop: int, data: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(slots of the pool, their part of the wire), both [blocks, slots, 2, kv_heads, words], for each run of neighbouring
        blocks. On a CPU such a run is copied at two to four times the speed of an index; empty where runs are too short to gain.
        """
        if self._words is None or not 0 <= start < stop <= table.num_slots:
            return []
        size = self.block_size
        ids = self._blocks_of(table, layer, start, stop)
        cuts = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
        if len(cuts) > _MAX_RUNS + len(ids) // _MIN_RUN_BLOCKS:
            return []
        wire = self._wire_view(data, (stop - start) * 2 * self.shape.num_kv_heads).view(torch.int64)
        wire = wire.view(stop - start, 2, self.shape.num_kv_heads, -1)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = 0
        for begin, end in pairwise(cuts):
            first, last = begin * size, end * size  # slots, counted from the first block's first
            for low, high in _pieces(max(first, start % size), min(last, start % size + stop - start), size):
                blocks = range(int(ids[low // size]), int(ids[low // size]) + max(1, (high - low) // size))
                offset = low % size
                span = min(size, high - low)
                mine = self._words[blocks.start : blocks.stop, :, :, offset : offset + span].permute(0, 3, 1, 2, 4)
                pairs.append((mine, wire[at : at + high - low].view(len(blocks), span, *wire.shape[1:])))
                at += high - low
        return pairs

    def _blocks_of(self, table: BlockTable, layer: int, start: int, stop: int) -> BlockIds:
        """The blocks of slots start … stop − 1, at least one. Raises InternalError when one of them is not held."""
        ids = table.layer_ids(layer)[start // self.block_size : -(-stop // self.block_size)]
        if ids.min() < 0 or ids.max() >= self.num_blocks:
            raise InternalError(f"slots {start}…{stop} of layer {layer} are not all held")
        return ids

    def _wire_view(self, data: torch.Tensor, num_rows: int) -> torch.Tensor:
        num_bytes = num_rows * self.shape.head_dim * self.dtype.num_bytes
        if data.dtype is not torch.uint8 or data.numel() != num_bytes:
            raise InternalError(f"a KV entry of {num_bytes} bytes does not fit a buffer of {data.numel()} × {data.dtype}")
        return data.view(self.data.dtype).view(num_rows, self.shape.head_dim)

    def _row_index(self, table: BlockTable, layer: int, start: int, stop: int) -> torch.Tensor:
        if not 0 <= start <= stop <= table.num_slots:
            raise InternalError(f"slots {start}…{stop} lie outside a table of {table.num_slots}")
        device, size = self.data.device, self.block_size
        if start < stop:
            self._blocks_of(table, layer, start, stop)
        slots = torch.arange(start, stop, device=device)
        blocks = torch.from_numpy(table.layer_ids(layer)).to(device, torch.int64)[slots // size]
        kv = torch.arange(2 * self.shape.num_kv_heads, device=device)
        rows = (blocks[:, None] * (2 * self.shape.num_kv_heads) + kv) * size + (slots % size)[:, None]  # [n, 2·kv_heads]
        return rows.reshape(-1)


def _pieces(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Slots start … stop − 1 cut into part of a block, whole blocks, part of a block."""
    first, last = -(-start // size) * size, stop // size * size
    if first > last:  # within one block
        yield start, stop
        return
    for low, high in ((start, first), (first, last), (last, stop)):
        if low < high:
            yield low, high
