"""The frozen decoder and its adapter in one differentiable pass over a batch of windows and spans. Keeps no cache.

The same arithmetic as quality/torch_model and held to it by a test; laid out for speed on CPUs: fused projections as the engine
loads them, attention in blocks that skip the future, and the layers below the adapter run once for teacher and student.
"""

from dataclasses import dataclass
from typing import Final, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.engine.rope import inverse_frequencies
from shoal.engine.weights import LayerWeights, ModelWeights
from shoal.errors import InternalError, Unsupported
from shoal.quality.tune.attention import LowerAttention, UpperAttention
from shoal.quality.tune.batch import TuneBatch
from shoal.quality.tune.lora import Lora, LoraLayer
from shoal.visibility import Visibility

_KNOWN: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class _Attention(Protocol):
    """Which rows see which."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, H, d], k and v [R, KV, d] → [R, H·d]."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Normed hidden states of the span rows, [G·n, h]: what the LM head takes."""

    student: Tensor
    teacher: Tensor | None  # of the same rows at full depth, without the adapter


class TunedModel:
    """Frozen weights and how to run them under a visibility's depth, with and without an adapter."""

    def __init__(self, weights: ModelWeights, visibility: Visibility, *, checkpointing: bool = False) -> None:
        """`visibility` is resolved. Raises Unsupported for an architecture whose arithmetic is not written here."""
        config = weights.config
        if config.architecture not in _KNOWN:
            raise Unsupported(f"tuning does not know {config.architecture!r} yet; it knows {', '.join(sorted(_KNOWN))}")
        if weights.embedding is None or weights.final_norm is None or weights.head is None:
            raise InternalError("tuning needs a whole model")
        self.config, self.weights, self.visibility = config, weights, visibility
        self.depth = visibility.depth(config.shape.num_layers)
        self._embedding, self._final_norm, self.head = weights.embedding, weights.final_norm, weights.head
        self._frequencies = inverse_frequencies(config.rope, config.shape.head_dim, self.head.device)
        self._checkpointing = checkpointing

    def run(self, batch: TuneBatch, lora: Lora, *, with_teacher: bool) -> Passes:
        """Both passes over a batch. Only the student's has gradients, and they reach the adapter alone."""
        first, num_layers = min(lora.first_layer, self.depth), self.config.shape.num_layers
        num_sequences, width = batch.ids.shape
        grid = torch.arange(width, device=batch.ids.device).repeat(num_sequences)  # [B·S] positions
        rotary = self._rotary(grid)
        lower = LowerAttention(self.config.shape, num_sequences, width)
        spans = (batch.sequence[:, None] * width + batch.positions).flatten()  # [G·n] rows of the grid
        with torch.no_grad():
            states = F.embedding(batch.ids.flatten(), self._embedding)
            for layer in range(first):
                states = self._layer(layer, None, states, rotary, lower.at(layer))
            teacher = None
            if with_teacher:
                full = states
                for layer in range(first, num_layers):
                    full = self._layer(layer, None, full, rotary, lower.at(layer))
                teacher = self._normed(full[spans])
        adapters = lora.matrices(self.head.dtype)
        for layer in range(first, self.depth):
            states = self._layer(layer, adapters.get(layer), states, rotary, lower.at(layer))
        if self.depth == num_layers:
            return Passes(self._normed(states[spans]), teacher)
        num_anchors = min(self.visibility.anchor_tokens, width)
        starts = torch.arange(num_sequences, device=grid.device)[:, None] * width
        anchors = (starts + torch.arange(num_anchors, device=grid.device)).flatten()  # [B·a]
        rows = torch.cat((anchors, spans))
        states, rotary = states[rows], self._rotary(grid[rows])
        upper = UpperAttention(self.config.shape, batch, num_anchors, self.visibility.sink)
        for layer in range(self.depth, num_layers):
            states = self._layer(layer, adapters.get(layer), states, rotary, upper.at(layer))
        return Passes(self._normed(states[len(anchors) :]), teacher)

    def _layer(
        self, layer: int, lora: LoraLayer | None, x: Tensor, rotary: tuple[Tensor, Tensor], attention: _Attention
    ) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return self._residual(self.weights.layers[layer], lora, x, rotary, attention)

        if self._checkpointing and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(run, x, use_reentrant=False))
        return run(x)

    def _residual(
        self, w: LayerWeights, lora: LoraLayer | None, x: Tensor, rotary: tuple[Tensor, Tensor], attention: _Attention
    ) -> Tensor:
        """One layer over rows [R, h]."""
        s, num_rows = self.config.shape, len(x)
        normed = self._norm(x, w.input_norm)
        heads = _linear(normed, w.qkv_weight, None if lora is None else lora.qkv, w.qkv_bias)
        heads = heads.view(num_rows, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        turning, v = torch.split(heads, [s.num_heads + s.num_kv_heads, s.num_kv_heads], dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = torch.split(turning, [s.num_heads, s.num_kv_heads], dim=1)
            turning = torch.cat((self._norm(q, w.q_norm), self._norm(k, w.k_norm)), dim=1)
        first, second = turning.chunk(2, dim=-1)
        cos, sin = rotary
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        q, k = torch.split(turned, [s.num_heads, s.num_kv_heads], dim=1)
        x = x + _linear(attention(q, k, v), w.output_weight, None if lora is None else lora.output)
        gate, up = _linear(self._norm(x, w.post_norm), w.gate_up_weight, None if lora is None else lora.gate_up).chunk(2, dim=-1)
        return x + _linear(F.silu(gate) * up, w.down_weight, None if lora is None else lora.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_eps)

    def _normed(self, x: Tensor) -> Tensor:
        return self._norm(x, self._final_norm)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None, None] * self._frequencies  # [R, 1, d / 2]
        return angles.cos().to(self.head.dtype), angles.sin().to(self.head.dtype)


def _linear(x: Tensor, weight: Tensor, lora: tuple[Tensor, Tensor] | None, bias: Tensor | None = None) -> Tensor:
    out = F.linear(x, weight, bias)
    return out if lora is None else out + F.linear(F.linear(x, lora[0]), lora[1])
