"""One decoder layer as torch modules, named as in Hugging Face's checkpoints. Knows shapes; knows no visibility.

The arithmetic is the engine's (engine/layers.py), out of place, batched and differentiable.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.layers import activate, soft_cap
from shoal.model_files import DecoderConfig


class RmsNorm(nn.Module):
    """Root-mean-square norm over the last dimension; the result is float32 under autocast, else the input's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


def turned(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding: heads [B, n, H, d] by cosines and sines [B, n, 1, d / 2]."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = rotary
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


class Attention(nn.Module):
    """Projections of one layer's attention, and the attention itself over keys that somebody gathered."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        s, bias = config.shape, config.qkv_bias
        self.head_dim, self.num_heads, self.num_kv_heads = s.head_dim, s.num_heads, s.num_kv_heads
        self.scale, self.cap = config.attention_scale, config.attention_softcap
        self.q_proj = nn.Linear(s.hidden_size, s.num_heads * s.head_dim, bias=bias)
        self.k_proj = nn.Linear(s.hidden_size, s.num_kv_heads * s.head_dim, bias=bias)
        self.v_proj = nn.Linear(s.hidden_size, s.num_kv_heads * s.head_dim, bias=bias)
        self.o_proj = nn.Linear(s.num_heads * s.head_dim, s.hidden_size, bias=False)
        self.q_norm = RmsNorm(s.head_dim, config.rms_eps) if config.qk_norm else None
        self.k_norm = RmsNorm(s.head_dim, config.rms_eps) if config.qk_norm else None

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries of normed x [B, n, h]: [B, H, n, d]."""
        heads = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        heads = heads if self.q_norm is None else self.q_norm(heads)
        return turned(heads, rotary).transpose(1, 2)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, of normed x [B, n, h]: each [B, KV, n, d]."""
        heads = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        heads = heads if self.k_norm is None else self.k_norm(heads)
        values: Tensor = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return turned(heads, rotary).transpose(1, 2), values.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, H, n, d], k and v [B, KV, m, d], mask [B, 1, n, m] (True = seen) or None for causal → projected [B, n, h]."""
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self.cap is None:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)
        else:
            attended = self._attend_capped(q, k, v, mask)
        return cast(Tensor, self.o_proj(attended.transpose(1, 2).flatten(2)))

    def shares(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        """How the attention of q [B, H, n, d] is divided among k [B, H, m, d] where `seen` [.., n, m]: [B, H, n, m] float32."""
        scores = soft_cap((q @ k.transpose(-1, -2)).float() * self.scale, self.cap)
        return scores.masked_fill(~seen, float("-inf")).softmax(-1)

    def _attend_capped(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The same with a soft cap on scores, which torch's own cannot take."""
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril() if mask is None else mask
        return self.shares(q, k, seen).to(v.dtype) @ v


class Mlp(nn.Module):
    """The gated MLP."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, wide = config.shape.hidden_size, config.shape.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(activate(self.gate_proj(x), self.activation) * self.up_proj(x)))


class DecoderLayer(nn.Module):
    """Two residual branches, each of which a gate may scale. Gemma's has a norm at the end of each branch."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, eps = config.shape.hidden_size, config.rms_eps
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(hidden, eps)  # Gemma: behind attention; else before the MLP
        self.pre_feedforward_layernorm = RmsNorm(hidden, eps) if config.branch_norms else None
        self.mlp = Mlp(config)
        self.post_feedforward_layernorm = RmsNorm(hidden, eps) if config.branch_norms else None

    def finish(self, x: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        """Add both branches to x [B, n, h]; `gate` [B, 2] scales the attention's and the MLP's."""
        x = self.add_attention(x, attended, None if gate is None else gate[:, 0, None, None])
        return self.add_mlp(x, None if gate is None else gate[:, 1, None, None])

    def add_attention(self, x: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        """The first residual; `gate` [B, 1, 1]."""
        if self.pre_feedforward_layernorm is not None:
            attended = self.post_attention_layernorm(attended)
        return x + (attended if gate is None else gate * attended)

    def add_mlp(self, x: Tensor, gate: Tensor | None) -> Tensor:
        """The second residual; `gate` [B, 1, 1]."""
        out = cast(Tensor, self.mlp((self.pre_feedforward_layernorm or self.post_attention_layernorm)(x)))
        if self.post_feedforward_layernorm is not None:
            out = self.post_feedforward_layernorm(out)
        return x + (out if gate is None else gate * out)
