"""Attention back ends, looked up by name. Knows their interface; what a kernel does is its own module's business."""

from collections.abc import Sequence
from typing import Protocol

import torch

from shoal.engine.native_attention import NativeAttention
from shoal.engine.query_runs import QueryRun
from shoal.engine.score_rule import ScoreRule
from shoal.engine.torch_attention import TorchAttention
from shoal.errors import InvalidConfig
from shoal.types import ModelShape


class PreparedAttention(Protocol):
    """Attention of one stage with its index tensors made, for all layers of the stage that share a window."""

    def attend(self, q: torch.Tensor, kv: torch.Tensor | None, pool_rows: torch.Tensor, layer_index: int) -> torch.Tensor:
        """q [n, heads, d] of the stage's rows, and their kv [n, 2, kv_heads, d], which the pool holds already.

        `kv` may be None for a back end that reads them there. `pool_rows` is KvPool.rows; `layer_index` counts from the
        stage's first layer. Returns [n, heads, d], contiguous.
        """
        ...


class AttentionBackend(Protocol):
    """Turns a stage's runs into a prepared attention. Made with what becomes of scores (None: the usual scale alone)."""

    def __init__(self, rule: ScoreRule | None = None) -> None: ...

    def prepare(
        self, runs: Sequence[QueryRun], window: int | None, shape: ModelShape, pool_rows: torch.Tensor, block_size: int
    ) -> PreparedAttention:
        """Make every index tensor and mask that the stage's layers with this window share."""
        ...


_BACKENDS: dict[str, type[AttentionBackend]] = {"native": NativeAttention, "torch": TorchAttention}


def attention_backend(name: str, rule: ScoreRule | None = None) -> AttentionBackend:
    """The back end called `name`. Raises InvalidConfig that lists the known ones, KernelsUnavailable for a missing "native"."""
    if name not in _BACKENDS:
        raise InvalidConfig(f"unknown attention back end {name!r}; known: {', '.join(sorted(_BACKENDS))}")
    return _BACKENDS[name](rule)
