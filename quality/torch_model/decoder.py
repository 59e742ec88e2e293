"""A decoder over prefill and decode streams under a visibility, in one differentiable pass. Keeps no cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from shoal.engine.layers import soft_cap
from shoal.engine.rope import Frequencies
from shoal.errors import InternalError
from shoal.model_files import DecoderConfig, ModelFiles
from shoal.quality.torch_model.batch import Batch
from shoal.quality.torch_model.layer import DecoderLayer, RmsNorm
from shoal.quality.torch_model.loading import fill
from shoal.quality.torch_model.views import Views
from shoal.types import DType
from shoal.visibility import VisibilityKind


@dataclass(frozen=True, slots=True)
class Gates:
    """Factors on the residual branches, per example and layer, last dimension (attention, MLP). None = 1.

    Setting both of a layer's prefill factors to 0 skips the layer for prefill tokens as POP does: its K and V projections of
    what enters it stay.
    """

    prefill: Tensor | None = None  # [B, L, 2]
    decode: Tensor | None = None  # [B, L, 2]
    sight: Tensor | None = None  # [B, L]: between what decode tokens see (1) and only the first token and each other (0)


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """What one layer did, for who looks on. Prefill fields are None where no prefill token runs the layer."""

    layer: int
    prefill_in: Tensor | None  # [B, P', h]; P' shrinks to the anchors above K under `speed`
    prefill_out: Tensor | None
    decode_in: Tensor  # [B, D, h]
    decode_out: Tensor
    decode_queries: Tensor  # [B, H, D, d], rotated
    keys: Tensor  # [B, KV, P' + D, d], rotated: of prefill tokens (or anchors), then of decode tokens
    seen: Tensor  # [B, 1, D, P' + D]: which keys each decode token sees


@dataclass(frozen=True, slots=True)
class Start:
    """Where a pass begins: what enters layer `layer`, from a pass that has run the layers below."""

    layer: int
    prefill: Tensor  # [B, P, h]
    decode: Tensor  # [B, D, h]


class _Body(nn.Module):
    """What Hugging Face's checkpoints call `model.`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.shape.vocab_size, config.shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.shape.num_layers))
        self.norm = RmsNorm(config.shape.hidden_size, config.rms_eps)


class TorchDecoder(nn.Module):
    """Weights as nn.Parameters under Hugging Face's names (`model.layers.3.self_attn.q_proj.weight`, `lm_head.weight`)."""

    frequencies: Frequencies

    def __init__(self, config: DecoderConfig) -> None:
        """An empty model; `load` fills it."""
        super().__init__()
        self.config = config
        self.model = _Body(config)
        self.lm_head = nn.Linear(config.shape.hidden_size, config.shape.vocab_size, bias=False)
        if config.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.frequencies = Frequencies.of(config)

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        *,
        dtype: DType = DType.FLOAT32,
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Every weight of a model's files, dequantised. `progress` gets bytes read and bytes to read."""
        with torch.device("meta"):
            model = cls(files.config)
        fill(model, files, dtype, device, progress)
        model.frequencies = Frequencies.of(files.config, device)
        return model

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    def with_layers(self, kept: Sequence[int]) -> "TorchDecoder":
        """The model made of some of its layers, in the given order, in both phases. Shares all weights."""
        windows = self.config.shape.windows
        shape = replace(
            self.config.shape, num_layers=len(kept), windows=tuple(windows[layer] for layer in kept) if windows else ()
        )
        with torch.device("meta"):
            model = TorchDecoder(replace(self.config, shape=shape))
        model.model.embed_tokens, model.model.norm, model.lm_head = self.model.embed_tokens, self.model.norm, self.lm_head
        model.model.layers = nn.ModuleList(self.model.layers[layer] for layer in kept)
        model.frequencies = self.frequencies
        return model.train(self.training)

    def forward(
        self,
        batch: Batch,
        *,
        gates: Gates | None = None,
        prefill_layers: Sequence[DecoderLayer] | None = None,
        trace: Callable[[LayerTrace], None] | None = None,
        checkpoint: bool = False,
        start: Start | None = None,
    ) -> Tensor:
        """Normed hidden states of the decode tokens, [B, D, h]: what `logits` takes. Rows of padding hold finite nonsense.

        `prefill_layers` runs prefill tokens through other modules than decode tokens (phase-aware quantisation). `trace` is
        called after each layer. `checkpoint` keeps no activations inside layers and computes them again in backward. `start`
        goes on above layers that have been run; it may begin at K at the highest.
        """
        gates = gates or Gates()
        depth = batch.visibility.depth(self.num_layers)
        if depth > self.num_layers or batch.visibility.boundary_tokens is None:
            raise InternalError(f"visibility '{batch.visibility}' is not resolved for {self.num_layers} layers")
        views = Views(batch, self.frequencies, self.config.shape.windows)
        if start is None:
            start = Start(0, self._embed(batch.prefill_ids), self._embed(batch.decode_ids))
        if start.layer > depth:
            raise InternalError(f"a pass that starts at layer {start.layer} cannot be shallow above layer {depth}")
        prefill, decode = start.prefill, start.decode
        for index in range(start.layer, self.num_layers):
            layer = cast(DecoderLayer, self.model.layers[index])
            if index == depth and batch.visibility.kind is VisibilityKind.SPEED:
                views = views.above(batch)
                prefill = prefill[:, : views.num_prefill]
            own = prefill_layers[index] if prefill_layers is not None else layer
            frozen = index >= depth and batch.visibility.kind is VisibilityKind.POP
            step = _Step(layer, own, views, index, frozen, gates, trace)
            if checkpoint and torch.is_grad_enabled():
                prefill, decode = recomputed(step, prefill, decode, use_reentrant=False)
            else:
                prefill, decode = step(prefill, decode)
        return cast(Tensor, self.model.norm(decode))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., V] in float32 of normed hidden states [..., h]."""
        scores = F.linear(hidden.to(self.lm_head.weight.dtype), self.lm_head.weight).float()
        return soft_cap(scores, self.config.logit_softcap)

    def _embed(self, token_ids: Tensor) -> Tensor:
        hidden = cast(Tensor, self.model.embed_tokens(token_ids))
        scale = self.config.embedding_scale
        return hidden if scale == 1.0 else hidden * torch.tensor(scale, dtype=hidden.dtype, device=hidden.device)


@dataclass(frozen=True, slots=True)
class _Step:
    """One layer over both streams: prefill tokens among themselves, then decode tokens over both."""

    layer: DecoderLayer
    prefill_layer: DecoderLayer
    views: Views
    index: int
    frozen: bool  # `pop` above K: prefill tokens leave KV and go no further
    gates: Gates
    trace: Callable[[LayerTrace], None] | None

    def __call__(self, prefill: Tensor, decode: Tensor) -> tuple[Tensor, Tensor]:
        views, attention = self.views, self.layer.self_attn
        prefill_out = prefill
        normed = self.layer.input_layernorm(decode)
        q = attention.queries(normed, views.decode_rotary(self.index))
        k, v = attention.keys_values(normed, views.decode_rotary(self.index))
        if views.num_prefill:
            own = self.prefill_layer
            normed = own.input_layernorm(prefill)
            prefill_k, prefill_v = own.self_attn.keys_values(normed, views.prefill_rotary(self.index))
            if not self.frozen:
                own_q = own.self_attn.queries(normed, views.prefill_rotary(self.index))
                attended = own.self_attn.attend(own_q, prefill_k, prefill_v, views.prefill_mask(self.index))
                prefill_out = own.finish(prefill, attended, _gate(self.gates.prefill, self.index))
            k, v = torch.cat([prefill_k, k], dim=2), torch.cat([prefill_v, v], dim=2)
        mask = views.decode_mask(self.index)
        attended = attention.attend(q, k, v, mask)
        if (sight := _gate(self.gates.sight, self.index)) is not None:
            blind = mask.clone()
            blind[..., 1 : views.num_prefill] = False
            attended = torch.lerp(attention.attend(q, k, v, blind), attended, sight[:, None, None])
        decode_out = self.layer.finish(decode, attended, _gate(self.gates.decode, self.index))
        if self.trace is not None:
            shown = None if self.frozen or not views.num_prefill else prefill
            out = None if shown is None else prefill_out
            self.trace(LayerTrace(self.index, shown, out, decode, decode_out, q, k, mask))
        return prefill_out, decode_out


def _gate(gates: Tensor | None, layer: int) -> Tensor | None:
    return None if gates is None else gates[:, layer]
