"""The tensors of a decoder as the engine multiplies them: fused projections, no copies between views. Computes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from shoal.model_files import DecoderConfig


@dataclass(frozen=True, slots=True)
class KvWeights:
    """What a layer needs to leave KV for a token without running it (POP's independent projections)."""

    input_norm: Tensor  # [h]
    kv_weight: Tensor  # [2·KV·d, h], rows ordered k, v
    kv_bias: Tensor | None  # [2·KV·d]
    k_norm: Tensor | None  # [d]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. H heads, KV key-value heads, d head_dim, h hidden size."""

    input_norm: Tensor  # [h]
    qkv_weight: Tensor  # [(H + 2·KV)·d, h], rows ordered q, k, v
    qkv_bias: Tensor | None  # [(H + 2·KV)·d]
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None  # [d]
    output_weight: Tensor  # [h, H·d]
    post_norm: Tensor  # [h]
    gate_up_weight: Tensor  # [2·ffn, h], rows ordered gate, up
    down_weight: Tensor  # [h, ffn]
    attention_norm: Tensor | None = None  # [h] behind attention, before its residual (Gemma)
    mlp_norm: Tensor | None = None  # [h] behind the MLP, before its residual (Gemma)

    @property
    def kv(self) -> KvWeights:
        """The layer's K and V projections: views of the fused rows."""
        first = self.output_weight.shape[1]  # H·d
        bias = None if self.qkv_bias is None else self.qkv_bias[first:]
        return KvWeights(self.input_norm, self.qkv_weight[first:], bias, self.k_norm)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """What one worker holds of a model."""

    config: DecoderConfig
    embedding: Tensor | None  # [V, h]
    layers: Mapping[int, LayerWeights]  # empty, and so the next, when somebody took the layers while they were read
    kv_only: Mapping[int, KvWeights]
    final_norm: Tensor | None  # [h]
    head: Tensor | None  # [V, h]; the embedding itself when tied and both are held
    num_layers: int  # held in full, here or by who took them
