"""Stages on a GPU: torch's matrix products with everything between them fused. Knows weights and rows, no requests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress

import numpy as np
import torch
import torch.nn.functional as F

from shoal.engine.attention import PreparedAttention
from shoal.engine.gpu import operations as gpu
from shoal.engine.gpu.decode_step import DecodeSteps
from shoal.engine.layer_backend import Ends, StageRows, StageWork
from shoal.engine.layers import activate, finish_layer, rms_norm
from shoal.engine.query_runs import QueryRun
from shoal.engine.rope import Rotation
from shoal.engine.score_rule import ScoreRule
from shoal.engine.torch_attention import TorchAttention
from shoal.engine.weights import KvWeights, LayerWeights
from shoal.errors import InternalError
from shoal.model_files import Activation, DecoderConfig


class GpuLayers:
    """See LayerBackend. The arithmetic of one layer; stages and recorded decode steps both run it."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.full: dict[int, LayerWeights] = {}
        self._kv: dict[int, KvWeights] = {}

    @property
    def rotation_dtype(self) -> torch.dtype:
        return torch.float32

    def hold(self, layers: Mapping[int, LayerWeights], kv_only: Mapping[int, KvWeights]) -> None:
        self.full |= layers
        self._kv |= {layer: weights.kv for layer, weights in layers.items()} | dict(kv_only)

    def run(self, work: StageWork) -> "GpuStage":
        return GpuStage(self, work)

    def whole_steps(self, ends: Ends) -> DecodeSteps:
        return DecodeSteps(self, ends)

    def score(self, x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return F.linear(gpu.rms_norm(x, norm, self.config.rms_eps), head).to(torch.float32)

    def weights(self, layer: int) -> LayerWeights:
        """Raises InternalError for a layer that is not held in full."""
        if layer not in self.full:
            raise InternalError(f"layer {layer} is not held in full here")
        return self.full[layer]

    def leave_kv(self, x: torch.Tensor, layer: int, turn: Rotation, pool: torch.Tensor, places: gpu.KvPlaces) -> None:
        """K and V of hidden x [n, h] at `layer`, which need not be held in full, to the pool."""
        if layer not in self._kv:
            raise InternalError(f"the K/V projection of layer {layer} is not held here")
        weights = self._kv[layer]
        fused = F.linear(gpu.rms_norm(x, weights.input_norm, self.config.rms_eps), weights.kv_weight, weights.kv_bias)
        self._store(fused, None, weights.k_norm, turn, pool, places)

    def project(
        self, x: torch.Tensor, weights: LayerWeights, turn: Rotation, pool: torch.Tensor, places: gpu.KvPlaces
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [n, heads, d] and kv [n, 2·kv_heads, d] of hidden x [n, h]; kv is in the pool too."""
        fused = F.linear(gpu.rms_norm(x, weights.input_norm, self.config.rms_eps), weights.qkv_weight, weights.qkv_bias)
        heads = self._store(fused, weights.q_norm, weights.k_norm, turn, pool, places)
        return heads[:, : self.config.shape.num_heads], heads[:, self.config.shape.num_heads :]

    def finish(self, x: torch.Tensor, attended: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """Output projection and MLP, each residual added by the matrix product itself; Gemma's norms come between them."""
        if weights.attention_norm is not None:
            return finish_layer(x, attended, weights, self.config)
        x = torch.addmm(x, attended.reshape(len(x), -1), weights.output_weight.t())
        gate_up = F.linear(gpu.rms_norm(x, weights.post_norm, self.config.rms_eps), weights.gate_up_weight)
        if self.config.activation is Activation.SILU:
            return torch.addmm(x, gpu.silu_multiply(gate_up), weights.down_weight.t())
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.addmm(x, activate(gate, self.config.activation) * up, weights.down_weight.t())

    def _store(
        self,
        fused: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        turn: Rotation,
        pool: torch.Tensor,
        places: gpu.KvPlaces,
    ) -> torch.Tensor:
        shape = self.config.shape
        heads = fused.view(len(fused), -1, shape.head_dim)
        first_key = heads.shape[1] - 2 * shape.num_kv_heads
        for own, norm in ((heads[:, :first_key], q_norm), (heads[:, first_key : first_key + shape.num_kv_heads], k_norm)):
            if norm is not None and own.shape[1]:
                own.copy_(rms_norm(own, norm, self.config.rms_eps))
        cos, sin = (table.view(len(fused), -1) for table in (turn.cos, turn.sin))
        gpu.rotate_and_store(heads, cos, sin, pool, places, shape.num_kv_heads)
        return heads


class GpuStage:
    """See StageRun. Every layer is yielded."""

    def __init__(self, backend: GpuLayers, work: StageWork) -> None:
        self._backend = backend
        self._work = work
        self._attentions: dict[int | None, _StageAttention] = {}
        self.x = None if work.full is None else work.full.x

    def layers(self, is_heard: Callable[[int], bool]) -> Iterator[int]:
        backend, pool = self._backend, self._work.pool
        stage, full, kv_only = self._work.stage, self._work.full, self._work.kv_only
        full_places = _places(full, len(stage.layers))
        kv_only_places = _places(kv_only, len(stage.layers))
        for index, layer in enumerate(stage.layers):
            window = backend.config.shape.window(layer)
            if kv_only is not None:
                backend.leave_kv(kv_only.x, layer, kv_only.rotations.of(window), pool.data, kv_only_places[index])
            if full is not None and self.x is not None:
                weights = backend.weights(layer)
                q, kv = backend.project(self.x, weights, full.rotations.of(window), pool.data, full_places[index])
            if is_heard(layer):
                yield layer
            if full is not None and self.x is not None:
                self.x = backend.finish(self.x, self._attention(layer).attend(q, kv, index), weights)

    def _attention(self, layer: int) -> "_StageAttention":
        window = self._backend.config.shape.window(layer)
        if window not in self._attentions:
            pool, runs = self._work.pool, self._work.stage.runs
            self._attentions[window] = _StageAttention(runs, window, self._backend.config, pool.data, pool.rows)
        return self._attentions[window]


def _places(rows: StageRows | None, num_layers: int) -> list[gpu.KvPlaces]:
    """Where the rows write in each layer; the kernel wants each layer's blocks in a row."""
    if rows is None:
        return []
    blocks, offsets = rows.group.blocks.contiguous(), rows.group.offsets.contiguous()
    return [gpu.KvPlaces(blocks[index], offsets) for index in range(num_layers)]


class _StageAttention:
    """Single rows by the kernel that reads KV in place; longer runs, and what a sink breaks up, by torch."""

    def __init__(
        self, runs: Sequence[QueryRun], window: int | None, config: DecoderConfig, pool: torch.Tensor, pool_rows: torch.Tensor
    ) -> None:
        device, self._scale = pool.device, config.attention_scale
        self._pool, self._pool_rows = pool, pool_rows
        is_single = [run.num_rows == 1 and not (run.geometry.sink and window is not None) for run in runs]
        single = list(compress(runs, is_single))
        others = [run for run, alone in zip(runs, is_single, strict=True) if not alone]
        self._others: PreparedAttention | None = None
        if others:
            self._others = TorchAttention(ScoreRule.of(config)).prepare(others, window, config.shape, pool_rows, pool.shape[3])
        self._rows, self._tables = torch.tensor([run.first_row for run in single], device=device), torch.empty(0)
        if single:
            longest = max(run.block_ids.shape[1] for run in single)
            padded = [np.pad(run.block_ids, ((0, 0), (0, longest - run.block_ids.shape[1]))) for run in single]
            self._tables = torch.from_numpy(np.stack(padded, axis=1).astype(np.int32)).to(device)  # [layers, n, blocks]
            self._slots, self._starts = (
                torch.tensor(values, dtype=torch.int32, device=device)
                for values in ([run.start_slot for run in single], [run.first_visible_slot(window) for run in single])
            )

    def attend(self, q: torch.Tensor, kv: torch.Tensor, layer_index: int) -> torch.Tensor:
        if self._others is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        else:
            out = self._others.attend(q, kv.view(len(kv), 2, -1, kv.shape[-1]), self._pool_rows, layer_index)
        if len(self._rows):
            keys = gpu.RowKeys(self._tables[layer_index], self._slots, self._starts)
            out[self._rows] = gpu.attend_rows(q[self._rows], self._pool, keys, self._scale)
        return out
