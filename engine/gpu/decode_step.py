"""A decode step whose shape never changes: every row one token through all layers. Recorded once a batch size as a CUDA graph.

A step of a few rows is thousands of small launches; replayed from a graph they cost the processor one. What differs between two
steps (tokens, positions, slots, block tables) lies in tensors at fixed addresses, which `_Batch.fill` overwrites.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shoal.engine.gpu import operations as gpu
from shoal.engine.kv_pool import KvPool
from shoal.engine.layer_backend import Ends
from shoal.engine.layers import embed, soft_cap
from shoal.engine.segment import LogitRows, Segment
from shoal.engine.stages import slot_geometry
from shoal.placement.blocks import BlockIds

if TYPE_CHECKING:
    from shoal.engine.gpu.layers import GpuLayers

_SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of a recorded step; fewer are padded


class DecodeSteps:
    """Runs the steps that qualify; the caller runs all others its usual way. One thread at a time."""

    def __init__(self, layers: "GpuLayers", ends: Ends) -> None:
        self.layers = layers
        self.ends = ends
        self._batches: dict[tuple[int, int], _Batch] = {}

    def run(self, segments: Sequence[Segment], pool: KvPool) -> torch.Tensor | None:
        """Logits [n, vocab] float32 of the segments' rows, valid until the next call; None when the step does not qualify."""
        num_layers = self.layers.config.shape.num_layers
        if len(segments) > _SIZES[-1] or not all(self._qualifies(segment, num_layers) for segment in segments):
            return None
        size = next(size for size in _SIZES if size >= len(segments))
        key = (size, pool.data.data_ptr())
        if key not in self._batches:
            self._batches[key] = _Batch(self, pool, size)
        return self._batches[key].run(segments)

    def _qualifies(self, segment: Segment, num_layers: int) -> bool:
        has_sink = segment.kv.layout.visibility.sink and any(self.layers.config.shape.window(i) for i in range(num_layers))
        is_row = len(segment.positions) == 1 and segment.logits is LogitRows.LAST
        return is_row and segment.token_ids is not None and len(segment.layers) == num_layers and not has_sink


class _Batch:
    """One batch size over one pool: tensors at fixed addresses and, on a GPU, the recording that reads them."""

    def __init__(self, steps: DecodeSteps, pool: KvPool, size: int) -> None:
        shape, device = steps.layers.config.shape, pool.data.device
        self._steps, self._pool, self._size = steps, pool, size
        self._num_layers = shape.num_layers
        num_blocks = -(-shape.max_context // pool.block_size)
        pinned = device.type == "cuda"

        def pair(*dims: int) -> tuple[torch.Tensor, torch.Tensor]:
            host = torch.zeros(dims, dtype=torch.int32, pin_memory=pinned)
            return host, torch.zeros(dims, dtype=torch.int32, device=device)

        self._host_rows, self._rows = pair(2 + 2 * shape.num_layers, size)  # ids, positions, slots and starts of each layer
        self._host_tables, self._tables = pair(size, shape.num_layers, num_blocks)
        self._held: list[tuple[BlockIds, BlockIds] | None] = [None] * size  # whose tables lie there
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)

    def run(self, segments: Sequence[Segment]) -> torch.Tensor:
        self._fill(segments)
        if self._rows.device.type != "cuda":
            return self._compute()[: len(segments)]
        if self._graph is None:
            self._record()
        else:
            self._graph.replay()
        return self._logits[: len(segments)]

    def _record(self) -> None:
        """Run once unrecorded, which compiles what has to be compiled, and once recorded; both compute the same step."""
        torch.cuda.synchronize()
        self._compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._compute()
        graph.replay()
        self._graph = graph

    def _fill(self, segments: Sequence[Segment]) -> None:
        if self._rows.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the last step's copies have read the host's side
        rows, shape = self._host_rows.numpy(), self._steps.layers.config.shape
        windows = [shape.window(layer) for layer in range(self._num_layers)]
        slots, starts = rows[2 : 2 + self._num_layers], rows[2 + self._num_layers :]
        slots[:] = -1
        for at, segment in enumerate(segments):
            position, token_ids = segment.positions.start, segment.token_ids or (0,)
            images = segment.kv.images
            turned = position if images is None else int(images.rotary_positions(segment.positions)[0, 0])
            rows[0, at], rows[1, at] = token_ids[0], turned
            lower = len(segment.kv.layout.lower_layers)
            slots[:lower, at] = position
            slots[lower:, at] = segment.kv.layout.upper_slot(position)
            for layer, window in enumerate(windows):
                slot = int(slots[layer, at])
                starts[layer, at] = 0 if window is None else slot_geometry(segment, layer).first_visible_slot(slot, window)
            self._fill_tables(at, segment)
        self._rows.copy_(self._host_rows, non_blocking=True)

    def _fill_tables(self, at: int, segment: Segment) -> None:
        lower, upper = segment.kv.lower.ids, segment.kv.upper.ids
        held = self._held[at]
        if held is not None and held[0] is lower and held[1] is upper:
            return
        self._held[at] = (lower, upper)
        tables, cut = self._host_tables[at].numpy(), len(lower)
        tables[:cut, : lower.shape[1]] = lower
        tables[cut : cut + len(upper), : upper.shape[1]] = upper
        used = max(lower.shape[1], upper.shape[1])
        self._tables[at, :, :used].copy_(self._host_tables[at, :, :used], non_blocking=True)

    def _compute(self) -> torch.Tensor:
        steps, pool, size = self._steps, self._pool, self._pool.block_size
        layers, num_layers = steps.layers, self._num_layers
        ids, positions = self._rows[0], self._rows[1]
        slots, starts = self._rows[2 : 2 + num_layers], self._rows[2 + num_layers :]
        at = (slots.clamp(min=0) // size).to(torch.int64).t().unsqueeze(2)  # [n, layers, 1]
        blocks = self._tables.gather(2, at).squeeze(2).t()
        blocks = torch.where(slots < 0, -1, blocks).contiguous()  # [layers, n]
        offsets = (slots % size).contiguous()
        turns = steps.ends.frequencies.rotations(positions, torch.float32)
        x = embed(ids, steps.ends.embedding, layers.config)
        for layer in range(num_layers):
            weights, turn = layers.weights(layer), turns.of(layers.config.shape.window(layer))
            q, _ = layers.project(x, weights, turn, pool.data, gpu.KvPlaces(blocks[layer], offsets[layer]))
            keys = gpu.RowKeys(self._tables[:, layer], slots[layer], starts[layer])
            x = layers.finish(x, gpu.attend_rows(q, pool.data, keys, layers.config.attention_scale), weights)
        return soft_cap(layers.score(x, steps.ends.norm, steps.ends.head), layers.config.logit_softcap)
