"""Stages by the compiled kernels: one call for all layers, or two per layer while somebody follows them. Knows addresses."""

import ctypes
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from shoal.engine.kernels import Kernels, kernels
from shoal.engine.kernels.memory import Arena
from shoal.engine.kernels.packing import PANEL, PackedLinear
from shoal.engine.kernels.structures import FinishArgs, LayerArgs, ProjectArgs, RowsArgs, StageArgs
from shoal.engine.layer_backend import Ends, StageRows, StageWork
from shoal.engine.native_attention import LOG2_E, RunTable
from shoal.engine.weights import KvWeights, LayerWeights
from shoal.errors import InternalError
from shoal.model_files import Activation, DecoderConfig


class NativeLayer:
    """One layer's weights as the kernels read them; the ones it was made from may go."""

    def __init__(self, config: DecoderConfig, weights: LayerWeights | KvWeights, arena: Arena) -> None:
        self._config = config
        self._kept: list[object] = []  # the addresses in `args` point here
        if isinstance(weights, KvWeights):
            self.args = LayerArgs(kv=self._project(weights, PackedLinear(weights.kv_weight, arena), weights.kv_bias, None, 0))
            return
        shape = config.shape
        qkv, first = PackedLinear(weights.qkv_weight, arena), shape.num_heads * shape.head_dim
        kv = qkv.from_row(first) if first % PANEL == 0 else PackedLinear(weights.kv.kv_weight, arena)
        output, gate_up, down = (
            PackedLinear(weights.output_weight, arena),
            PackedLinear.gate_up(weights.gate_up_weight, arena),
            PackedLinear(weights.down_weight, arena),
        )
        self._kept += [output, gate_up, down, weights.post_norm, weights.attention_norm, weights.mlp_norm]
        self.args = LayerArgs(
            project=self._project(weights, qkv, weights.qkv_bias, weights.q_norm, shape.num_heads),
            kv=self._project(weights, kv, weights.kv.kv_bias, None, 0),
            finish=FinishArgs(
                norm=weights.post_norm.data_ptr(),
                attention_norm=_address(weights.attention_norm),
                mlp_norm=_address(weights.mlp_norm),
                gelu=config.activation is Activation.GELU_TANH,
                output=output.args,
                gate_up=gate_up.args,
                down=down.args,
                eps=config.rms_eps,
            ),
        )

    def _project(
        self,
        weights: LayerWeights | KvWeights,
        linear: PackedLinear,
        bias: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        num_heads: int,
    ) -> ProjectArgs:
        shape = self._config.shape
        self._kept += [weights.input_norm, linear, bias, q_norm, weights.k_norm]
        return ProjectArgs(
            norm=weights.input_norm.data_ptr(),
            bias=_address(bias),
            q_norm=_address(q_norm),
            k_norm=_address(weights.k_norm),
            linear=linear.args,
            heads=num_heads,
            kv_heads=shape.num_kv_heads,
            d=shape.head_dim,
            eps=self._config.rms_eps,
        )


class NativeStage:
    """See StageRun. Holds every tensor and table whose address the call carries."""

    def __init__(self, backend: "NativeLayers", work: StageWork) -> None:
        shape, pool, stage = backend.config.shape, work.pool, work.stage
        if pool.data.dtype is not backend.dtype:
            raise InternalError(f"a pool of {pool.data.dtype} for a model of {backend.dtype}")
        self._backend = backend
        self._stage_layers = stage.layers
        self._runs = RunTable(stage.runs)
        self._windows = np.array([shape.window(layer) or 0 for layer in stage.layers], dtype=np.int64)
        self.args = StageArgs(
            windows=self._windows.ctypes.data,
            pool=pool.data.data_ptr(),
            runs=self._runs.address,
            num_runs=len(stage.runs),
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            d=shape.head_dim,
            block_size=pool.block_size,
            num_threads=torch.get_num_threads(),
            scale=LOG2_E * backend.config.attention_scale,
            cap=LOG2_E * (backend.config.attention_softcap or 0.0),
        )
        self._kept: list[object] = []
        self.x: torch.Tensor | None = None
        if work.full is not None:
            self.args.full, self.x = self._rows(work.full)
            self.args.full_layers = self._addresses(backend.full, "layer {} is not held in full here")
            padded = len(self.x) + 15  # matrix tiles may read, and ignore, so many rows more
            q, attended = (torch.empty(padded, shape.num_heads, shape.head_dim, dtype=backend.dtype) for _ in range(2))
            self._kept += [q, attended]
            self.args.q, self.args.attended = q.data_ptr(), attended.data_ptr()
        if work.kv_only is not None:
            self.args.kv, _ = self._rows(work.kv_only)
            self.args.kv_layers = self._addresses(
                backend.full | backend.kv_only, "the K/V projection of layer {} is not held here"
            )

    def layers(self, is_heard: Callable[[int], bool]) -> Iterator[int]:
        done = 0  # halves of layers: up to K and V, and from attention on
        for index, layer in enumerate(self._stage_layers):
            if not is_heard(layer):
                continue
            stop = 2 * index + 1
            self._run(done, stop)
            done = stop
            yield layer
        self._run(done, 2 * len(self._stage_layers))

    def _run(self, start: int, stop: int) -> None:
        self._backend.kernels.run_stage(self._backend.dtype, self.args, start, stop)

    def _addresses(self, held: Mapping[int, NativeLayer], complaint: str) -> int:
        missing = [layer for layer in self._stage_layers if layer not in held]
        if missing:
            raise InternalError(complaint.format(missing[0]))
        addresses = [ctypes.addressof(held[layer].args) for layer in self._stage_layers]
        table = (ctypes.c_void_p * len(addresses))(*addresses)
        self._kept.append(table)
        return ctypes.addressof(table)

    def _rows(self, rows: StageRows) -> tuple[RowsArgs, torch.Tensor]:
        backend, group = self._backend, rows.group
        x, turns = backend.checked(rows.x), rows.rotations
        tables = [table.contiguous() for turn in (turns.everywhere, turns.in_windows) for table in (turn.cos, turn.sin)]
        blocks, offsets = group.blocks.contiguous(), group.offsets.contiguous()
        if blocks.shape != (len(self._stage_layers), len(x)) or len(offsets) != len(x) or tables[0].dtype is not torch.float32:
            raise InternalError(f"{len(x)} rows of {len(self._stage_layers)} layers, but places {tuple(blocks.shape)}")
        held = [x, *tables, blocks, offsets]
        self._kept += held
        return RowsArgs(*(tensor.data_ptr() for tensor in held), len(x)), x


class NativeLayers:
    """See LayerBackend. Raises KernelsUnavailable where there are no kernels."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.kernels: Kernels = kernels()
        self._arena = Arena()
        self.full: dict[int, NativeLayer] = {}
        self.kv_only: dict[int, NativeLayer] = {}

    @property
    def rotation_dtype(self) -> torch.dtype:
        return torch.float32

    def hold(self, layers: Mapping[int, LayerWeights], kv_only: Mapping[int, KvWeights]) -> None:
        self.full |= {layer: NativeLayer(self.config, weights, self._arena) for layer, weights in layers.items()}
        self.kv_only |= {layer: NativeLayer(self.config, weights, self._arena) for layer, weights in kv_only.items()}

    def run(self, work: StageWork) -> NativeStage:
        """The full rows' x is replaced in place."""
        return NativeStage(self, work)

    def whole_steps(self, ends: Ends) -> None:
        return None

    def score(self, x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return self.kernels.score(self.checked(x), norm, head, self.config.rms_eps)

    def checked(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as the kernels can read it. Raises InternalError for another type or width."""
        if x.dtype is not self.dtype or x.shape[-1] != self.config.shape.hidden_size:
            raise InternalError(f"hidden states of {x.dtype} {tuple(x.shape)} in a model of {self.dtype}")
        return x.contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
