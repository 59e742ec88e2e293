"""The arithmetic of one decoder layer on plain rows. Knows weights and shapes; knows no requests, slots or cache."""

import torch
import torch.nn.functional as F

from shoal.engine.rope import Rotation
from shoal.engine.weights import KvWeights, LayerWeights
from shoal.model_files import Activation, DecoderConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, the mean in float32."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return wide.to(x.dtype) * weight


def project_qkv(
    x: torch.Tensor, weights: LayerWeights, config: DecoderConfig, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input norm, the fused projection, head norms, rotation: q [n, heads, d], kv [n, 2, kv_heads, d] of hidden x [n, h]."""
    shape = config.shape
    fused = F.linear(rms_norm(x, weights.input_norm, config.rms_eps), weights.qkv_weight, weights.qkv_bias)
    heads = fused.view(len(x), -1, shape.head_dim)  # [n, heads + 2 · kv_heads, d]
    turning = heads[:, : shape.num_heads + shape.num_kv_heads]
    q, k = heads[:, : shape.num_heads], turning[:, shape.num_heads :]
    if weights.q_norm is not None and weights.k_norm is not None:
        q.copy_(rms_norm(q, weights.q_norm, config.rms_eps))
        k.copy_(rms_norm(k, weights.k_norm, config.rms_eps))
    rotation.apply_(turning)
    return q, heads[:, shape.num_heads :].view(len(x), 2, shape.num_kv_heads, shape.head_dim)


def project_kv(x: torch.Tensor, weights: KvWeights, config: DecoderConfig, rotation: Rotation) -> torch.Tensor:
    """What a row leaves behind where it runs no further: kv [n, 2, kv_heads, d] of hidden x [n, h] (design §2, `pop`)."""
    fused = F.linear(rms_norm(x, weights.input_norm, config.rms_eps), weights.kv_weight, weights.kv_bias)
    kv = fused.view(len(x), 2, config.shape.num_kv_heads, config.shape.head_dim)
    if weights.k_norm is not None:
        kv[:, 0] = rms_norm(kv[:, 0], weights.k_norm, config.rms_eps)
    rotation.apply_(kv[:, 0])
    return kv


def finish_layer(x: torch.Tensor, attended: torch.Tensor, weights: LayerWeights, config: DecoderConfig) -> torch.Tensor:
    """Output projection and MLP with their norms and residuals: hidden x [n, h] and attended [n, heads, d] → [n, h]."""
    output = F.linear(attended.flatten(1), weights.output_weight)
    if weights.attention_norm is not None:
        output = rms_norm(output, weights.attention_norm, config.rms_eps)
    x = x + output
    gate, up = F.linear(rms_norm(x, weights.post_norm, config.rms_eps), weights.gate_up_weight).chunk(2, dim=-1)
    down = F.linear(activate(gate, config.activation).mul_(up), weights.down_weight)
    if weights.mlp_norm is not None:
        down = rms_norm(down, weights.mlp_norm, config.rms_eps)
    return x + down


def activate(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    """What multiplies `up`."""
    return F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")


def embed(token_ids: torch.Tensor, embedding: torch.Tensor, config: DecoderConfig) -> torch.Tensor:
    """Hidden states on entry: rows of the embedding [vocab, h], scaled where the family does so, in the embedding's type."""
    rows = F.embedding(token_ids, embedding)
    if config.embedding_scale == 1.0:
        return rows
    return rows * torch.tensor(config.embedding_scale, dtype=rows.dtype, device=rows.device)


def soft_cap(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap · tanh(scores / cap); the scores themselves without a cap."""
    return scores if cap is None else scores.div(cap).tanh().mul(cap)
