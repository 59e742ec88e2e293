"""Layers by torch's own operations. Knows weights and how layers.py uses them; works on every device and type."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shoal.engine.layer_backend import Destination, LayerRunner
from shoal.engine.layers import finish_layer, project_kv, project_qkv, rms_norm
from shoal.engine.rope import Rotation
from shoal.engine.weights import KvWeights, LayerWeights
from shoal.model_files import DecoderConfig


@dataclass(frozen=True, slots=True)
class TorchLayer:
    """See LayerRunner."""

    weights: LayerWeights
    config: DecoderConfig

    def project(self, x: torch.Tensor, rotation: Rotation, to: Destination) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, kv = project_qkv(x, self.weights, self.config, rotation)
        to.pool.write(kv, to.blocks, to.offsets)
        return q, kv

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return finish_layer(x, attended, self.weights, self.config)


@dataclass(frozen=True, slots=True)
class TorchKv:
    """See KvRunner."""

    weights: KvWeights
    config: DecoderConfig

    def leave_kv(self, x: torch.Tensor, rotation: Rotation, to: Destination) -> None:
        to.pool.write(project_kv(x, self.weights, self.config, rotation), to.blocks, to.offsets)


@dataclass(frozen=True, slots=True)
class TorchLayers:
    """The back end "torch"; see LayerBackend."""

    config: DecoderConfig
    dtype: torch.dtype

    @property
    def rotation_dtype(self) -> torch.dtype:
        return self.dtype

    def layer(self, weights: LayerWeights) -> TorchLayer:
        return TorchLayer(weights, self.config)

    def kv(self, weights: KvWeights) -> TorchKv:
        return TorchKv(weights, self.config)

    def kv_of(self, layer: LayerRunner, weights: LayerWeights) -> TorchKv:
        return TorchKv(weights.kv, self.config)

    def score(self, x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return F.linear(rms_norm(x, norm, self.config.rms_eps), head).to(torch.float32)
