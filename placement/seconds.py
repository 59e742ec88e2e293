"""Seconds of a request's parts when it runs alone, given rates. Knows counts and rates; knows no load, queue or clock.

Source: prefill at depth K and the decode step of the capacity model (docs/visibility.md), over the counts of placement/cost.py.
"""

from dataclasses import dataclass

from shoal.placement.cost import LegCost, kv_layer_tokens_read, kv_projection_weights, layer_weights, request_cost
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility, VisibilityKind


@dataclass(frozen=True, slots=True)
class Rates:
    """What a worker achieves, measured or assumed: peak × efficiency. Positive; zero is allowed for the overheads only."""

    linear_flops_per_s: float
    attention_flops_per_s: float
    weight_bytes_per_s: float
    kv_bytes_per_s: float
    num_half_tokens: float = 0.0  # rows at which linear layers reach half of their rate
    layer_s: float = 0.0  # overhead per layer and step
    step_s: float = 0.0  # overhead per step

    def __post_init__(self) -> None:
        rates = (self.linear_flops_per_s, self.attention_flops_per_s, self.weight_bytes_per_s, self.kv_bytes_per_s)
        if not all(rate > 0 for rate in rates) or not all(
            cost >= 0 for cost in (self.num_half_tokens, self.layer_s, self.step_s)
        ):
            raise ValueError(f"rates must be positive and overheads not negative: {self}")


@dataclass(frozen=True, slots=True)
class RequestSeconds:
    """The parts of one request that runs alone; the handoff between the legs is not in it."""

    prefill_s: float
    first_step_s: float  # anchors and boundary tokens at decode, until the first token
    later_steps_s: float  # all tokens after the first


def request_seconds(
    shape: ModelShape, dtype: DType, visibility: Visibility, num_prompt_tokens: int, num_generated_tokens: int, rates: Rates
) -> RequestSeconds:
    """Estimate a request of N prompt and g ≥ 1 generated tokens on idle workers, nothing cached, prefill in one chunk."""
    first = request_cost(shape, visibility, num_prompt_tokens, 1)
    num_prefill = visibility.split(num_prompt_tokens).num_prefill_tokens
    num_boundary = num_prompt_tokens - num_prefill
    late_projections = shape.num_layers - visibility.depth(shape.num_layers) if visibility.late and num_prefill else 0
    num_weights = _decode_weights(shape) + late_projections * kv_projection_weights(shape)
    first_step_s = _pass_seconds(
        first.decode, num_boundary, num_weights * dtype.num_bytes, shape.num_layers * rates.layer_s + rates.step_s, rates
    )
    later_steps_s = sum(
        decode_step_seconds(
            shape, dtype, 1, kv_layer_tokens_read(shape, visibility, num_prompt_tokens, num_boundary + later), rates
        )
        for later in range(1, num_generated_tokens)
    )
    prefill_s = prefill_seconds(shape, dtype, visibility, first.prefill, rates, num_tokens=num_prefill)
    return RequestSeconds(prefill_s, first_step_s, later_steps_s)


def prefill_seconds(
    shape: ModelShape, dtype: DType, visibility: Visibility, cost: LegCost, rates: Rates, *, num_tokens: int, num_chunks: int = 1
) -> float:
    """Seconds of a prefill leg alone on its worker, cut into `num_chunks` steps of the `num_tokens` it runs.

    max(linear/(F · n/(n + n_half)), weight bytes/BW) + attention/F_a + K·t_layer + t_step, n tokens per chunk; the weights
    are read again for each chunk, and the upper layers' K/V projections by plain `pop`. 0.0 when nothing is run.
    """
    if num_tokens == 0:
        return 0.0
    depth = visibility.depth(shape.num_layers)
    num_projections = shape.num_layers - depth if visibility.kind is VisibilityKind.POP and not visibility.late else 0
    num_weights = depth * layer_weights(shape) + num_projections * kv_projection_weights(shape)
    overhead_s = num_chunks * (depth * rates.layer_s + rates.step_s)
    return _pass_seconds(cost, num_tokens / num_chunks, num_chunks * num_weights * dtype.num_bytes, overhead_s, rates)


def decode_step_seconds(shape: ModelShape, dtype: DType, num_requests: int, num_kv_layer_tokens: int, rates: Rates) -> float:
    """Seconds of one decode step of B one-token rows that read so many (token, layer) pairs of KV together.

    max(weight bytes/BW, 2·B·weights/F) + kb·pairs/BW_kv + L·t_layer + t_step, the LM head among the weights.
    """
    num_weights = _decode_weights(shape)
    weights_s = num_weights * dtype.num_bytes / rates.weight_bytes_per_s
    linear_s = 2 * num_requests * num_weights / rates.linear_flops_per_s
    kv_s = num_kv_layer_tokens * shape.kv_elements * dtype.num_bytes / rates.kv_bytes_per_s
    return max(weights_s, linear_s) + kv_s + shape.num_layers * rates.layer_s + rates.step_s


def _decode_weights(shape: ModelShape) -> int:
    """Weights a decode step reads: every layer and the LM head."""
    return shape.num_layers * layer_weights(shape) + shape.hidden_size * shape.vocab_size


def _pass_seconds(cost: LegCost, rows: float, weight_bytes: int, overhead_s: float, rates: Rates) -> float:
    """max(linear/(F · n/(n + n_half)), weight bytes/BW) + attention/F_a + overheads, n rows in each linear layer call."""
    linear_s = cost.linear_flops / (rates.linear_flops_per_s * rows / (rows + rates.num_half_tokens))
    attention_s = cost.attention_flops / rates.attention_flops_per_s
    return max(linear_s, weight_bytes / rates.weight_bytes_per_s) + attention_s + overhead_s
