"""A model as the cost model sees it: placement's counts, plus latent attention, experts and bytes per element. No weights.

Sources: Llama and Gemma shapes as in their config.json; latent attention (MLA) and experts as in DeepSeek-V2 and V3 (arXiv
2405.04434, 2412.19437).
"""

from dataclasses import dataclass, replace

from shoal.errors import InvalidConfig
from shoal.placement.cost import kv_projection_weights, layer_weights
from shoal.types import ModelShape


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA: one latent vector of `kv_rank + rope_dim` elements per token and layer instead of K and V heads."""

    q_rank: int  # 0 = queries are projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in every layer but the first `num_dense_layers`."""

    num_routed: int
    num_active: int
    num_shared: int
    intermediate_size: int
    num_dense_layers: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything formulas 1–4 need. `shape` is what placement's arithmetic gets: for MLA its KV elements are the latent's."""

    name: str
    shape: ModelShape
    source: str
    mla: LatentAttention | None = None
    experts: Experts | None = None
    num_mlp_matrices: int = 3  # 3 gated, 2 not
    tied_embeddings: bool = False
    weight_bytes: float = 2.0  # bytes per weight
    kv_bytes: float = 2.0  # e: bytes per KV element
    hidden_bytes: float = 2.0  # e_h: bytes per hidden element on the wire

    @property
    def kv_token_bytes(self) -> float:
        """kb: KV bytes per token and layer: 2 · kv_heads · d · e (GQA), (rank + rope) · e (MLA)."""
        return self.shape.kv_elements * self.kv_bytes

    @property
    def attention_pair_flops(self) -> int:
        """FLOPs per (query, key) pair and layer: 4·H·d, for MLA 2·H·(d_nope + d_rope + d_value) on expanded K and V."""
        heads = self.shape.num_heads
        if self.mla is not None:
            return 2 * heads * (self.mla.nope_dim + self.mla.rope_dim + self.mla.value_dim)
        return 4 * heads * self.shape.head_dim

    @property
    def kv_projection_weights(self) -> int:
        """p_kv: what a skipped `pop` layer still multiplies by; for MLA the projection to the latent."""
        return kv_projection_weights(self.shape)

    def active_weights(self, layer: int) -> int:
        """p: weights one token is multiplied by in a layer (routed experts: only the active ones)."""
        experts = self._experts_of(layer)
        if experts is None:
            return self._attention_weights + self._mlp_weights(self.shape.intermediate_size)
        router = self.shape.hidden_size * experts.num_routed
        return (
            self._attention_weights
            + router
            + (experts.num_active + experts.num_shared) * self._mlp_weights(experts.intermediate_size)
        )

    def read_weights(self, layer: int, num_tokens: float) -> float:
        """Weights a step of n tokens reads in a layer. Of E experts, E·(1 − (1 − k/E)^n) are touched (uniform routing)."""
        experts = self._experts_of(layer)
        if experts is None:
            return self.active_weights(layer)
        share: float = 1 - (1 - experts.num_active / experts.num_routed) ** num_tokens
        return self.resident_weights(layer) - (1 - share) * experts.num_routed * self._mlp_weights(experts.intermediate_size)

    def resident_weights(self, layer: int) -> int:
        """Weights of a layer in memory."""
        experts = self._experts_of(layer)
        if experts is None:
            return self.active_weights(layer)
        idle = (experts.num_routed - experts.num_active) * self._mlp_weights(experts.intermediate_size)
        return self.active_weights(layer) + idle

    @property
    def head_weights(self) -> int:
        """Weights of the LM head, h · V."""
        return self.shape.hidden_size * self.shape.vocab_size

    @property
    def num_parameters(self) -> int:
        """All weights of the model, norms left out."""
        layers = sum(self.resident_weights(layer) for layer in range(self.shape.num_layers))
        return layers + self.head_weights * (1 if self.tied_embeddings else 2)

    def with_precision(
        self, *, weight_bytes: float | None = None, kv_bytes: float | None = None, hidden_bytes: float | None = None
    ) -> "ModelSpec":
        """The same model at other precisions. Raises InvalidConfig for a precision of no bytes."""
        spec = replace(
            self,
            weight_bytes=self.weight_bytes if weight_bytes is None else weight_bytes,
            kv_bytes=self.kv_bytes if kv_bytes is None else kv_bytes,
            hidden_bytes=self.hidden_bytes if hidden_bytes is None else hidden_bytes,
        )
        if spec.weight_bytes <= 0 or spec.kv_bytes <= 0 or spec.hidden_bytes <= 0:
            raise InvalidConfig("bytes per weight, per KV and per hidden element must be more than zero")
        return spec

    def _experts_of(self, layer: int) -> Experts | None:
        return None if self.experts is None or layer < self.experts.num_dense_layers else self.experts

    @property
    def _attention_weights(self) -> int:
        hidden, heads = self.shape.hidden_size, self.shape.num_heads
        if self.mla is None:
            return layer_weights(self.shape) - 3 * hidden * self.shape.intermediate_size
        mla, query_dim = self.mla, heads * (self.mla.nope_dim + self.mla.rope_dim)
        queries = hidden * mla.q_rank + mla.q_rank * query_dim if mla.q_rank else hidden * query_dim
        latent = hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * heads * (mla.nope_dim + mla.value_dim)
        return queries + latent + heads * mla.value_dim * hidden

    def _mlp_weights(self, intermediate_size: int) -> int:
        return self.num_mlp_matrices * self.shape.hidden_size * intermediate_size
