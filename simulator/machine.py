"""One worker's hardware: GPUs joined by tensor parallelism, under a profile. Knows rates, memory and price; knows no request.

Tensor parallelism (Megatron-LM, arXiv 1909.08053): weights, heads and FLOPs are divided among the ranks, two all-reduces of the
hidden states per layer. KV heads are replicated where there are fewer of them than ranks (formula 3: × max(1, TP/kv_heads));
the latent of MLA counts as one head.
"""

from dataclasses import dataclass

from shoal.errors import InvalidConfig
from shoal.simulator.hardware import Gpu
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.profiles import Profile


@dataclass(frozen=True, slots=True)
class Machine:
    """A worker: `tensor_parallel` GPUs. Rates of all ranks together, losses included."""

    gpu: Gpu
    profile: Profile
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise InvalidConfig(f"tensor parallelism of {self.tensor_parallel} makes no sense; use 1 or more")

    def check_model(self, model: ModelSpec) -> None:
        """Raise InvalidConfig when the heads cannot be divided among the ranks."""
        if model.shape.num_heads % self.tensor_parallel:
            raise InvalidConfig(f"{model.name} has {model.shape.num_heads} heads, not divisible by TP {self.tensor_parallel}")

    def linear_flops_per_s(self, model: ModelSpec) -> float:
        """F · e_g, at fp8 rates where the weights have one byte and the GPU offers them."""
        peak = self.gpu.fp8_flops if model.weight_bytes <= 1 and self.gpu.fp8_flops else self.gpu.flops
        return peak * self.profile.gemm * self.tensor_parallel

    @property
    def attention_flops_per_s(self) -> float:
        """F · e_a."""
        return self.gpu.flops * self.profile.attention * self.tensor_parallel

    @property
    def weight_bytes_per_s(self) -> float:
        """BW · e_w."""
        return self.gpu.memory_bytes_per_s * self.profile.weight_read * self.tensor_parallel

    def kv_bytes_per_s(self, model: ModelSpec) -> float:
        """BW · e_kv for bytes counted once: replicated heads are read by several ranks."""
        return self.gpu.memory_bytes_per_s * self.profile.kv_read * self.tensor_parallel / self.replication(model)

    def replication(self, model: ModelSpec) -> float:
        """How many times each KV byte is held: max(1, TP / kv_heads)."""
        return max(1.0, self.tensor_parallel / model.shape.num_kv_heads)

    def allreduce_seconds(self, model: ModelSpec, num_tokens: float, num_layers: float) -> float:
        """Two ring all-reduces of n·h elements per layer: 2·(2·(TP−1)/TP · bytes/NVLink + latency). 0 without TP."""
        ranks = self.tensor_parallel
        if ranks == 1:
            return 0.0
        num_bytes = num_tokens * model.shape.hidden_size * model.hidden_bytes
        ring = 2 * (ranks - 1) / ranks * num_bytes / self.gpu.nvlink_bytes_per_s
        return num_layers * 2 * (ring + self.profile.allreduce_s)

    @property
    def usable_bytes(self) -> float:
        """Memory of all ranks for weights and KV."""
        return self.gpu.memory_bytes * self.profile.memory * self.tensor_parallel

    @property
    def usd_per_hour(self) -> float | None:
        """Price of the worker; None when the GPU has none."""
        return None if self.gpu.usd_per_hour is None else self.gpu.usd_per_hour * self.tensor_parallel
