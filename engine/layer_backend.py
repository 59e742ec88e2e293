"""Who computes a layer around attention: the interface. Knows shapes; what a kernel does is its own module's business."""

from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.engine.kv_pool import KvPool
from shoal.engine.rope import Rotation
from shoal.engine.weights import KvWeights, LayerWeights
from shoal.model_files import DecoderConfig


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the K and V of some rows go in one layer."""

    pool: KvPool
    blocks: torch.Tensor  # [n]
    offsets: torch.Tensor  # [n] slot within the block


class LayerRunner(Protocol):
    """One layer whose weights are held in full."""

    def project(self, x: torch.Tensor, rotation: Rotation, to: Destination) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden x [n, h] → q [n, heads, d], with K and V written to the pool, and once more as kv [n, 2, kv_heads, d] where
        the attention that goes with this back end wants them."""
        ...

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP with their residuals: x [n, h] and attended [n, heads, d] → [n, h]."""
        ...


class KvRunner(Protocol):
    """One layer of which the K and V projections are enough."""

    def leave_kv(self, x: torch.Tensor, rotation: Rotation, to: Destination) -> None:
        """Write K and V of hidden x [n, h] to the pool."""
        ...


class LayerBackend(Protocol):
    """Makes runners; a runner may keep the weights in a form of its own, and then not the ones it was given."""

    @property
    def rotation_dtype(self) -> torch.dtype:
        """The type in which runners want cosines and sines."""
        ...

    def layer(self, weights: LayerWeights) -> LayerRunner: ...

    def kv(self, weights: KvWeights) -> KvRunner: ...

    def kv_of(self, layer: LayerRunner, weights: LayerWeights) -> KvRunner:
        """The K and V projections of a layer that is held in full."""
        ...

    def score(self, x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head: hidden x [n, h] → [n, vocab] float32."""
        ...


class MakeLayerBackend(Protocol):
    """A back end's constructor."""

    def __call__(self, config: DecoderConfig, dtype: torch.dtype) -> LayerBackend: ...
