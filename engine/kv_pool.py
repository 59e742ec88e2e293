"""The tensor behind a worker's blocks. Knows slots and the wire layout; who owns a block is placement's BlockPool."""

import math

import numpy as np
import torch

from shoal.engine.dtypes import torch_dtype
from shoal.engine.kernels import memory
from shoal.errors import InternalError, InvalidConfig
from shoal.placement.blocks import BlockIds
from shoal.placement.tables import BlockTable
from shoal.types import DType, ModelShape


def block_bytes(shape: ModelShape, block_size: int, dtype: DType) -> int:
    """Bytes of one block: `block_size` tokens × one layer's K and V."""
    return shape.kv_elements * block_size * dtype.num_bytes


class KvPool:
    """`data` [num_blocks, 2, kv_heads, block_size, head_dim]; K = 0, V = 1; the rotary embedding is applied before caching.

    `pack` and `unpack` may run in a transfer thread while a step runs, on blocks that the step does not touch.
    """

    def __init__(
        self, shape: ModelShape, num_blocks: int, block_size: int, dtype: DType, device: torch.device | str = "cpu"
    ) -> None:
        """Raises InvalidConfig when there is not so much memory."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        dims = (num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
        try:
            on_cpu, element = torch.device(device).type == "cpu", torch_dtype(dtype)
            made = memory.empty(dims, element) if on_cpu else torch.empty(dims, dtype=element, device=device)
            self.data = made.zero_()
        except RuntimeError as error:  # the allocator's: nothing else here can fail
            size = f"{math.prod(dims) * dtype.num_bytes / 1e9:.1f} GB"
            raise InvalidConfig(f"a KV pool of {size} cannot be allocated on {device}; lower kv_memory_bytes") from error
        self.rows = self.data.view(-1, shape.head_dim)  # one row per (block, K or V, head, slot)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def write(self, kv: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Store kv [n, 2, kv_heads, head_dim] at (blocks [n], offsets [n])."""
        self.data[blocks, :, :, offsets] = kv

    def copy_blocks(self, sources: BlockIds, targets: BlockIds) -> None:
        """Copy whole blocks, pairwise: an answer takes its own copy of a block that it is about to write in."""
        if len(sources):
            device = self.data.device
            at = [torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64)).to(device) for ids in (sources, targets)]
            self.data.index_copy_(0, at[1], self.data.index_select(0, at[0]))

    def pack(self, table: BlockTable, layer: int, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy slots [start, stop) of one layer into `out`, a uint8 tensor on any device, as [n, 2, kv_heads, head_dim]."""
        rows = self._row_index(table, layer, start, stop)
        view = self._wire_view(out, len(rows))
        if view.device == self.data.device:
            torch.index_select(self.rows, 0, rows, out=view)
        else:
            view.copy_(torch.index_select(self.rows, 0, rows))

    def unpack(self, table: BlockTable, layer: int, start: int, stop: int, data: torch.Tensor) -> None:
        """Copy `data`, a uint8 tensor in the wire layout on any device, into slots [start, stop) of one layer."""
        rows = self._row_index(table, layer, start, stop)
        self.rows.index_copy_(0, rows, self._wire_view(data, len(rows)).to(self.data.device))

    def _wire_view(self, data: torch.Tensor, num_rows: int) -> torch.Tensor:
        num_bytes = num_rows * self.shape.head_dim * self.dtype.num_bytes
        if data.dtype is not torch.uint8 or data.numel() != num_bytes:
            raise InternalError(f"a KV entry of {num_bytes} bytes does not fit a buffer of {data.numel()} × {data.dtype}")
        return data.view(self.data.dtype).view(num_rows, self.shape.head_dim)

    def _row_index(self, table: BlockTable, layer: int, start: int, stop: int) -> torch.Tensor:
        if not 0 <= start <= stop <= table.num_slots:
            raise InternalError(f"slots {start}…{stop} lie outside a table of {table.num_slots}")
        device, size = self.data.device, self.block_size
        slots = torch.arange(start, stop, device=device)
        blocks = torch.from_numpy(table.layer_ids(layer)).to(device, torch.int64)[slots // size]
        kv = torch.arange(2 * self.shape.num_kv_heads, device=device)
        rows = (blocks[:, None] * (2 * self.shape.num_kv_heads) + kv) * size + (slots % size)[:, None]  # [n, 2·kv_heads]
        return rows.reshape(-1)
