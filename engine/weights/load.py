"""Loads the weights a worker holds, tensor by tensor, and reports what was read. Knows no attention and no KV."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.kernels import memory
from shoal.engine.weights.held import HeldLayers
from shoal.engine.weights.layers import KvWeights, LayerWeights, ModelWeights
from shoal.engine.weights.read import TensorReader, open_reader
from shoal.errors import InvalidConfig
from shoal.model_files import FAMILIES, NORMS, FileFormat, ModelFiles, Part, TensorInfo
from shoal.types import DType

Progress = Callable[[int, int], None]  # bytes read so far, bytes to read
Take = Callable[[Mapping[int, LayerWeights], Mapping[int, KvWeights]], None]  # layers in full, layers for K and V alone

_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
_KV_PARTS = (Part.K, Part.V)
_QKV_PARTS = (Part.Q, *_KV_PARTS)
_BIASES = {Part.Q: Part.Q_BIAS, Part.K: Part.K_BIAS, Part.V: Part.V_BIAS}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading read and what it left in memory."""

    bytes_read: int  # from files, counted at the read call
    tensors_read: int
    layers_opened: tuple[int, ...]  # of which at least one tensor was read
    resident_bytes: int  # of the tensors held
    seconds: float


def load_weights(
    model: ModelFiles,
    held: HeldLayers,
    *,
    dtype: DType,
    device: str = "cpu",
    progress: Progress | None = None,
    take: Take | None = None,
) -> tuple[ModelWeights, LoadReport]:
    """Read only what `held` names, in the given dtype; a quantised file is dequantised in float32 first.

    With `take` every layer is given away as soon as it is read and not kept, so that who keeps layers in a form of its own
    needs memory for one of them twice, not for all.
    Raises InvalidConfig when the model lacks such layers or a file changed since `open_model`.
    """
    held.check(model.config.shape.num_layers)
    begin = time.monotonic()
    with open_reader(model.format) as reader:
        loader = _Loader(model, held, reader, _DTYPES[dtype], torch.device(device), progress)
        weights = loader.load(take)
        report = LoadReport(
            bytes_read=reader.num_bytes_read,
            tensors_read=reader.num_tensors_read,
            layers_opened=tuple(sorted(loader.layers_opened)),
            resident_bytes=loader.resident_bytes,
            seconds=time.monotonic() - begin,
        )
    return weights, report


class _Loader:
    def __init__(
        self,
        model: ModelFiles,
        held: HeldLayers,
        reader: TensorReader,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._model, self._held, self._reader = model, held, reader
        self._dtype, self._device, self._progress = dtype, device, progress
        self._head_dim, self._config = model.config.shape.head_dim, model.config
        # llama.cpp's converter reorders the q and k rows of this architecture alone, for its own rotary embedding.
        self._has_paired_rows = model.format is FileFormat.GGUF and model.config.architecture == "llama"
        is_folder = model.format is FileFormat.HF  # GGUF files hold the sum
        self._norm_offset = FAMILIES[model.config.architecture].norm_offset if is_folder else 0.0
        self._total_bytes = sum(model.tensor(part, layer).num_bytes for part, layer in self._wanted())
        self.layers_opened: set[int] = set()
        self.resident_bytes = 0

    def load(self, take: Take | None) -> ModelWeights:
        held = self._held
        embedding = self._tensor(Part.EMBEDDING) if held.embedding else None
        layers: dict[int, LayerWeights] = {}
        kv_only: dict[int, KvWeights] = {}
        for layer in held.full:
            full = {layer: self._layer(layer)}
            layers.update(full) if take is None else take(full, {})
        for layer in held.kv_only:
            kv = {layer: self._kv(layer)}
            kv_only.update(kv) if take is None else take({}, kv)
        final_norm = self._tensor(Part.FINAL_NORM) if held.head else None
        head: Tensor | None = None
        if held.head:
            head = embedding if self._shares_head else self._tensor(Part.HEAD)
        return ModelWeights(self._config, embedding, layers, kv_only, final_norm, head, len(held.full))

    @property
    def _shares_head(self) -> bool:
        return self._config.tied_embeddings and self._held.embedding

    def _wanted(self) -> list[tuple[Part, int | None]]:
        """Every (part, layer) that `load` reads."""
        held = self._held
        wanted: list[tuple[Part, int | None]] = [(Part.EMBEDDING, None)] if held.embedding else []
        if held.head:
            wanted += [(Part.FINAL_NORM, None)] + ([] if self._shares_head else [(Part.HEAD, None)])
        kv = [Part.INPUT_NORM, *_KV_PARTS]
        kv += [_BIASES[part] for part in _KV_PARTS] if self._config.qkv_bias else []
        kv += [Part.K_NORM] if self._config.qk_norm else []
        full = [*kv, Part.Q, Part.OUTPUT, Part.POST_NORM, Part.GATE, Part.UP, Part.DOWN]
        full += [Part.Q_BIAS] if self._config.qkv_bias else []
        full += [Part.Q_NORM] if self._config.qk_norm else []
        full += [Part.ATTENTION_NORM, Part.MLP_NORM] if self._config.branch_norms else []
        wanted += [(part, layer) for layer in held.full for part in full]
        return wanted + [(part, layer) for layer in held.kv_only for part in kv]

    def _layer(self, layer: int) -> LayerWeights:
        biases = tuple(_BIASES[part] for part in _QKV_PARTS)
        return LayerWeights(
            input_norm=self._tensor(Part.INPUT_NORM, layer),
            qkv_weight=self._fused(_QKV_PARTS, layer),
            qkv_bias=self._fused(biases, layer) if self._config.qkv_bias else None,
            q_norm=self._tensor(Part.Q_NORM, layer) if self._config.qk_norm else None,
            k_norm=self._tensor(Part.K_NORM, layer) if self._config.qk_norm else None,
            output_weight=self._tensor(Part.OUTPUT, layer),
            post_norm=self._tensor(Part.POST_NORM, layer),
            gate_up_weight=self._fused((Part.GATE, Part.UP), layer),
            down_weight=self._tensor(Part.DOWN, layer),
            attention_norm=self._tensor(Part.ATTENTION_NORM, layer) if self._config.branch_norms else None,
            mlp_norm=self._tensor(Part.MLP_NORM, layer) if self._config.branch_norms else None,
        )

    def _kv(self, layer: int) -> KvWeights:
        biases = tuple(_BIASES[part] for part in _KV_PARTS)
        return KvWeights(
            input_norm=self._tensor(Part.INPUT_NORM, layer),
            kv_weight=self._fused(_KV_PARTS, layer),
            kv_bias=self._fused(biases, layer) if self._config.qkv_bias else None,
            k_norm=self._tensor(Part.K_NORM, layer) if self._config.qk_norm else None,
        )

    def _tensor(self, part: Part, layer: int | None = None) -> Tensor:
        return self._fused((part,), layer)

    def _fused(self, parts: tuple[Part, ...], layer: int | None) -> Tensor:
        """Parts of equal width stacked along rows, each read straight into its place."""
        infos = [self._model.tensor(part, layer) for part in parts]
        shape = (sum(info.shape[0] for info in infos), *infos[0].shape[1:])
        if self._device.type == "cpu":
            out = memory.empty(shape, self._dtype)
        else:
            out = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.resident_bytes += out.nbytes
        row = 0
        for part, info in zip(parts, infos, strict=True):
            pairs_of = self._head_dim if self._has_paired_rows and part in (Part.Q, Part.K) else None
            self._read_into(part, layer, info, out[row : row + info.shape[0]], pairs_of)
            row += info.shape[0]
            if layer is not None:
                self.layers_opened.add(layer)
            if self._progress is not None:
                self._progress(self._reader.num_bytes_read, self._total_bytes)
        return out

    def _read_into(self, part: Part, layer: int | None, info: TensorInfo, out: Tensor, pairs_of: int | None) -> None:
        """A weight, with what the adapter adds to it. The sum is made in float32 and rounded once."""
        adapter = self._model.adapter
        added = None if adapter is None or layer is None else adapter.low_rank.get((part, layer))
        if adapter is None or added is None:
            offset = self._norm_offset if part in NORMS else 0.0
            self._reader.read_into(info, out, pairs_of=pairs_of, offset=offset)
            return
        whole, a, b = (torch.empty(t.shape) for t in (info, added.a, added.b))
        self._reader.read_into(info, whole, pairs_of=pairs_of)
        for tensor, matrix in ((added.a, a), (added.b, b)):
            self._reader.read_into(tensor, matrix)
        out.copy_(whole.addmm_(b, a, alpha=added.scale))
        if not torch.isfinite(out).all():
            raise InvalidConfig(
                f"adapter {adapter.path} makes {part} of layer {layer} hold numbers that are not finite in {self._dtype}: its "
                f"weights are damaged, or its lora_alpha is too large"
            )
