"""Layers by the compiled kernels: a few calls per layer, each over all rows. Knows weights and addresses; builds nothing."""

import torch

from shoal.engine.kernels import Kernels, kernels
from shoal.engine.kernels.packing import PANEL, PackedLinear
from shoal.engine.kernels.structures import FinishArgs, ProjectArgs
from shoal.engine.layer_backend import Destination, LayerRunner
from shoal.engine.rope import Rotation
from shoal.engine.weights import KvWeights, LayerWeights
from shoal.errors import InternalError
from shoal.model_files import DecoderConfig


class NativeKv:
    """Input norm, projection, head norms, rotation, and K and V into the pool, in one call; see KvRunner."""

    def __init__(self, backend: "NativeLayers", weights: KvWeights | LayerWeights, linear: PackedLinear, num_heads: int) -> None:
        bias = weights.kv_bias if isinstance(weights, KvWeights) else weights.qkv_bias
        q_norm = None if isinstance(weights, KvWeights) else weights.q_norm
        self.backend, self.linear, self.num_heads = backend, linear, num_heads
        self._kept = (weights.input_norm, bias, q_norm, weights.k_norm)  # the call holds their addresses
        shape = backend.config.shape
        self._call = ProjectArgs(
            norm=weights.input_norm.data_ptr(),
            bias=_address(bias),
            q_norm=_address(q_norm),
            k_norm=_address(weights.k_norm),
            linear=linear.args,
            heads=num_heads,
            kv_heads=shape.num_kv_heads,
            d=shape.head_dim,
            eps=backend.config.rms_eps,
        )

    def leave_kv(self, x: torch.Tensor, rotation: Rotation, to: Destination) -> None:
        self.run(x, rotation, to, None)

    def run(self, x: torch.Tensor, rotation: Rotation, to: Destination, q: torch.Tensor | None) -> None:
        backend, pool = self.backend, to.pool
        x, blocks = backend.checked(x), to.blocks.contiguous()
        if pool.data.dtype is not backend.dtype or blocks.shape[0] != x.shape[0]:
            raise InternalError(f"{x.shape[0]} rows of {backend.dtype} for {blocks.shape[0]} slots of {pool.data.dtype}")
        call = ProjectArgs.from_buffer_copy(self._call)
        call.x, call.q, call.pool = x.data_ptr(), _address(q), pool.data.data_ptr()
        call.cos, call.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        call.blocks, call.offsets = blocks.data_ptr(), to.offsets.data_ptr()
        call.rows, call.block_size, call.num_threads = x.shape[0], pool.block_size, torch.get_num_threads()
        backend.kernels.project(backend.dtype, call)


class NativeLayer:
    """See LayerRunner. Holds packed copies; the weights it was made from may go."""

    def __init__(self, backend: "NativeLayers", weights: LayerWeights) -> None:
        self.backend = backend
        self.qkv = PackedLinear(weights.qkv_weight)
        self._project = NativeKv(backend, weights, self.qkv, backend.config.shape.num_heads)
        self._linears = (
            PackedLinear(weights.output_weight),
            PackedLinear.gate_up(weights.gate_up_weight),
            PackedLinear(weights.down_weight),
        )
        self._norm = weights.post_norm
        output, gate_up, down = (linear.args for linear in self._linears)
        self._finish = FinishArgs(
            norm=self._norm.data_ptr(), output=output, gate_up=gate_up, down=down, eps=backend.config.rms_eps
        )

    def project(self, x: torch.Tensor, rotation: Rotation, to: Destination) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = self.backend.config.shape
        q = torch.empty(x.shape[0], shape.num_heads, shape.head_dim, dtype=self.backend.dtype)
        self._project.run(x, rotation, to, q)
        return q, None

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = self.backend.checked(x)
        out = torch.empty_like(x)
        call = FinishArgs.from_buffer_copy(self._finish)
        call.x, call.attended, call.out = x.data_ptr(), attended.data_ptr(), out.data_ptr()
        call.rows, call.num_threads = x.shape[0], torch.get_num_threads()
        self.backend.kernels.finish(self.backend.dtype, call)
        return out


class NativeLayers:
    """The back end "native"; see LayerBackend. Raises KernelsUnavailable where there are no kernels."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.kernels: Kernels = kernels()

    @property
    def rotation_dtype(self) -> torch.dtype:
        return torch.float32

    def layer(self, weights: LayerWeights) -> NativeLayer:
        return NativeLayer(self, weights)

    def kv(self, weights: KvWeights) -> NativeKv:
        return NativeKv(self, weights, PackedLinear(weights.kv_weight), 0)

    def kv_of(self, layer: LayerRunner, weights: LayerWeights) -> NativeKv:
        first = self.config.shape.num_heads * self.config.shape.head_dim
        if isinstance(layer, NativeLayer) and first % PANEL == 0:
            return NativeKv(self, weights.kv, layer.qkv.from_row(first), 0)
        return self.kv(weights.kv)

    def score(self, x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return self.kernels.score(self.checked(x), norm, head, self.config.rms_eps)

    def checked(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as the kernels can read it. Raises InternalError for another type or width."""
        if x.dtype is not self.dtype or x.shape[-1] != self.config.shape.hidden_size:
            raise InternalError(f"hidden states of {x.dtype} {tuple(x.shape)} in a model of {self.dtype}")
        return x.contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
