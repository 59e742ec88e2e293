"""Stages by torch's own operations and an attention back end. Knows weights and how layers.py uses them; runs everywhere."""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F

from shoal.engine.attention import AttentionBackend, PreparedAttention
from shoal.engine.layer_backend import Ends, StageWork
from shoal.engine.layers import finish_layer, project_kv, project_qkv, rms_norm
from shoal.engine.weights import KvWeights, LayerWeights
from shoal.errors import InternalError
from shoal.model_files import DecoderConfig


class TorchStage:
    """See StageRun. Every layer is yielded."""

    def __init__(self, backend: "TorchLayers", work: StageWork) -> None:
        self._backend = backend
        self._work = work
        self._attentions: dict[int | None, PreparedAttention] = {}
        self.x = None if work.full is None else work.full.x

    def layers(self, is_heard: Callable[[int], bool]) -> Iterator[int]:
        backend, config = self._backend, self._backend.config
        stage, full, kv_only, pool = self._work.stage, self._work.full, self._work.kv_only, self._work.pool
        for index, layer in enumerate(stage.layers):
            if kv_only is not None:
                kv = project_kv(kv_only.x, backend.kv_weights(layer), config, kv_only.rotations.of(config.shape.window(layer)))
                pool.write(kv, kv_only.group.blocks[index], kv_only.group.offsets)
            if full is not None and self.x is not None:
                weights = backend.layer_weights(layer)
                q, kv = project_qkv(self.x, weights, config, full.rotations.of(config.shape.window(layer)))
                pool.write(kv, full.group.blocks[index], full.group.offsets)
            if is_heard(layer):
                yield layer
            if full is not None and self.x is not None:
                attended = self._attention(layer).attend(q, kv, pool.rows, index)
                self.x = finish_layer(self.x, attended, weights, config)

    def _attention(self, layer: int) -> PreparedAttention:
        shape, pool = self._backend.config.shape, self._work.pool
        window = shape.window(layer)
        if window not in self._attentions:
            prepare = self._backend.attention.prepare
            self._attentions[window] = prepare(self._work.stage.runs, window, shape, pool.rows, pool.block_size)
        return self._attentions[window]


class TorchLayers:
    """See LayerBackend."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, attention: AttentionBackend) -> None:
        self.config = config
        self.attention = attention
        self._dtype = dtype
        self._layers: dict[int, LayerWeights] = {}
        self._kv: dict[int, KvWeights] = {}

    @property
    def rotation_dtype(self) -> torch.dtype:
        return self._dtype

    def hold(self, layers: Mapping[int, LayerWeights], kv_only: Mapping[int, KvWeights]) -> None:
        self._layers |= layers
        self._kv |= {layer: weights.kv for layer, weights in layers.items()} | dict(kv_only)

    def run(self, work: StageWork) -> TorchStage:
        return TorchStage(self, work)

    def whole_steps(self, ends: Ends) -> None:
        return None

    def score(self, x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return F.linear(rms_norm(x, norm, self.config.rms_eps), head).to(torch.float32)

    def layer_weights(self, layer: int) -> LayerWeights:
        """Raises InternalError for a layer that is not held in full."""
        if layer not in self._layers:
            raise InternalError(f"layer {layer} is not held in full here")
        return self._layers[layer]

    def kv_weights(self, layer: int) -> KvWeights:
        """Raises InternalError for a layer whose K/V projection is not held."""
        if layer not in self._kv:
            raise InternalError(f"the K/V projection of layer {layer} is not held here")
        return self._kv[layer]
