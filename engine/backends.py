"""Which implementation computes: "native" (CPU), "triton" (CUDA), "torch", or "auto". Nothing falls back in silence.

What was chosen and why is in the log, in the metric shoal_engine_backend_info and in `Backend`.
"""

import logging
import os
from dataclasses import dataclass

import torch

from shoal.engine.kernels import KernelsUnavailable, kernels
from shoal.engine.layer_backend import LayerBackend
from shoal.engine.native_layers import NativeLayers
from shoal.engine.score_rule import ScoreRule
from shoal.engine.self_test import check_native
from shoal.engine.torch_attention import TorchAttention
from shoal.engine.torch_layers import TorchLayers
from shoal.errors import InvalidConfig
from shoal.metrics import gauge
from shoal.model_files import DecoderConfig
from shoal.types import DType

_log = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "triton", "torch")
_INFO = gauge("shoal_engine_backend_info", "1 for the back end that computes, and why not the native one", ["backend", "reason"])
_TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
_MAX_HEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Backend:
    """What a decoder computes with. `reason`: why "auto" did not take the device's own one, else empty."""

    name: str
    reason: str
    layers: LayerBackend

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def choose_backend(name: str, config: DecoderConfig, dtype: DType, device: torch.device) -> Backend:
    """Try the device's own back end unless "torch" was asked for. Raises InvalidConfig for an unknown name, and when one was
    asked for by name and does not work here."""
    if name not in BACKENDS:
        raise InvalidConfig(f"unknown back end {name!r}; known: {', '.join(BACKENDS)}")
    if name == "torch":
        backend = _plain(config, dtype, "")
    elif name == "triton" or (name == "auto" and device.type == "cuda"):
        backend = _triton_or_plain(config, dtype, device)
    else:
        backend = _native_or_plain(config, dtype, device)
    if name not in ("auto", backend.name):
        raise InvalidConfig(f"the {name} back end cannot run here: {backend.reason}; use 'auto' or 'torch'")
    _INFO.labels(backend.name, backend.reason).set(1)
    if backend.reason:
        _log.warning("computing with torch's own operations, several times slower: %s", backend.reason)
    else:
        _log.info("computing with the %s back end", backend.name)
    return backend


def _native_or_plain(config: DecoderConfig, dtype: DType, device: torch.device) -> Backend:
    reason = _unsupported(config, dtype, device)
    if reason is not None:
        return _plain(config, dtype, reason)
    try:
        check_native(kernels(), _TORCH_DTYPES[dtype])
        return Backend("native", "", NativeLayers(config, _TORCH_DTYPES[dtype]))
    except KernelsUnavailable as error:
        return _plain(config, dtype, str(error))


def _triton_or_plain(config: DecoderConfig, dtype: DType, device: torch.device) -> Backend:
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        return _plain(config, dtype, f"Triton needs a GPU, not {device.type}")
    if config.attention_softcap is not None:
        return _plain(config, dtype, "the Triton kernels have no soft cap on attention scores")
    try:
        from shoal.engine.gpu.layers import GpuLayers  # imports Triton
    except ImportError as error:
        return _plain(config, dtype, f"Triton cannot be imported ({error}); install shoal[cuda]")
    return Backend("triton", "", GpuLayers(config, _TORCH_DTYPES[dtype]))


def _plain(config: DecoderConfig, dtype: DType, reason: str) -> Backend:
    return Backend("torch", reason, TorchLayers(config, _TORCH_DTYPES[dtype], TorchAttention(ScoreRule.of(config))))


def _unsupported(config: DecoderConfig, dtype: DType, device: torch.device) -> str | None:
    """Why the kernels cannot serve such a model there, or None."""
    shape = config.shape
    if device.type != "cpu":
        return f"no native kernels for {device.type}"
    if shape.head_dim * dtype.num_bytes > _MAX_HEAD_BYTES:
        return f"head_dim {shape.head_dim} is too large in {dtype}"
    if any(size % 2 for size in (shape.head_dim, shape.hidden_size, shape.intermediate_size)):
        return "head_dim, hidden and intermediate size must be even"
    return None
