"""What one request costs each leg: token-layers, FLOPs, KV read. Knows shapes and counts; knows no rates, load or queue.

Source: the formulas of prefill at depth K and of a decode step in the capacity model that docs/visibility.md lists, split by
leg. Symbols: p weights of one layer, p_kv its K and V projections, A_l causal pairs of a layer (`causal_pairs`), P prefill
tokens, α anchors, t decode tokens. The router balances by token-layers; placement/seconds.py turns the rest into time.
"""

from dataclasses import dataclass
from typing import NamedTuple

from shoal.placement.arithmetic import num_decode_tokens
from shoal.types import ModelShape
from shoal.visibility import Visibility, VisibilityKind


@dataclass(frozen=True, slots=True)
class LegCost:
    """The work of one leg of a request. FLOPs count a multiply-add as two."""

    token_layers: int  # tokens × layers they run, a K/V projection counted as its share of a layer's weights
    linear_flops: int
    attention_flops: int

    @property
    def flops(self) -> int:
        return self.linear_flops + self.attention_flops


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Both legs of a request."""

    prefill: LegCost
    decode: LegCost


def kv_projection_weights(shape: ModelShape) -> int:
    """p_kv: weights of one layer's K and V projections."""
    return shape.hidden_size * shape.kv_elements


def layer_weights(shape: ModelShape) -> int:
    """p: weights of one Llama-family layer (attention and gated MLP; norms and biases left out)."""
    attention = 2 * shape.hidden_size * shape.num_heads * shape.head_dim + kv_projection_weights(shape)
    return attention + 3 * shape.hidden_size * shape.intermediate_size


def causal_pairs(num_tokens: int, window: int | None = None) -> int:
    """A_l(N): (query, key) pairs of N consecutive tokens: N(N+1)/2, or w(w+1)/2 + (N−w)·w in a window layer."""
    if window is None or num_tokens <= window:
        return num_tokens * (num_tokens + 1) // 2
    return window * (window + 1) // 2 + (num_tokens - window) * window


def request_cost(
    shape: ModelShape,
    visibility: Visibility,
    num_prompt_tokens: int,
    num_generated_tokens: int,
    *,
    num_prefill_cached: int = 0,
    num_decode_cached: int = 0,
) -> RequestCost:
    """The cost of N prompt and g generated tokens under a resolved visibility.

    Prefill runs tokens p … P−1 through K layers (`pop` projects K and V above). Decode runs t = (N − P) + max(0, g − 1)
    tokens through L, anchors c … α−1 through L − K (`speed`), and projects above K under late `pop`; one LM head per
    sampled token. p (`num_prefill_cached`) and c (`num_decode_cached`) are the cached prefixes of the two sides. When c = P
    prefill is not called. Boundary tokens are counted at decode. Windows are in the attention terms.
    """
    split, num_layers = visibility.split(num_prompt_tokens), shape.num_layers
    num_prefill, num_anchors, depth = split.num_prefill_tokens, split.num_anchor_tokens, visibility.depth(num_layers)
    work = _work(shape, visibility, num_prompt_tokens, num_generated_tokens, num_prefill_cached, num_decode_cached)
    num_run, num_new_anchors, num_decode = work.num_run, work.num_new_anchors, work.num_decode
    weights, kv_weights = layer_weights(shape), kv_projection_weights(shape)

    prefill_pairs = decode_pairs = 0
    for layer in range(num_layers):
        window = shape.window(layer)
        if layer < depth and num_run:
            prefill_pairs += causal_pairs(num_prefill, window) - causal_pairs(num_prefill - num_run, window)
        if layer < depth or visibility.kind is not VisibilityKind.SPEED:
            decode_pairs += causal_pairs(num_prefill + num_decode, window) - causal_pairs(num_prefill, window)
            continue
        reach = None if visibility.sink else window  # how far back a query sees anchors
        decode_pairs += causal_pairs(num_anchors, reach) - causal_pairs(num_anchors - num_new_anchors, reach)
        decode_pairs += causal_pairs(num_decode, window)
        decode_pairs += _anchor_pairs(num_anchors, num_prefill, num_decode, reach)

    def leg(num_token_layers: int, num_projected: int, num_pairs: int, head_flops: int) -> LegCost:
        return LegCost(
            _token_layers(shape, num_token_layers, num_projected),
            2 * (num_token_layers * weights + num_projected * kv_weights) + head_flops,
            4 * shape.num_heads * shape.head_dim * num_pairs,
        )

    head_flops = 2 * shape.hidden_size * shape.vocab_size * num_generated_tokens
    return RequestCost(
        leg(work.prefill_token_layers, work.num_projected_early, prefill_pairs, 0),
        leg(work.decode_token_layers, work.num_projected_late, decode_pairs, head_flops),
    )


def request_token_layers(
    shape: ModelShape, visibility: Visibility, num_prompt_tokens: int, num_generated_tokens: int
) -> tuple[int, int]:
    """`token_layers` of both legs of `request_cost`, prefill's first, with nothing cached: what balance goes by."""
    work = _work(shape, visibility, num_prompt_tokens, num_generated_tokens, 0, 0)
    return (
        _token_layers(shape, work.prefill_token_layers, work.num_projected_early),
        _token_layers(shape, work.decode_token_layers, work.num_projected_late),
    )


class _Work(NamedTuple):
    """What runs of one request, in tokens and in tokens × layers."""

    num_run: int
    num_new_anchors: int
    num_decode: int
    num_projected_early: int
    num_projected_late: int
    prefill_token_layers: int
    decode_token_layers: int


def _work(
    shape: ModelShape,
    visibility: Visibility,
    num_prompt: int,
    num_generated: int,
    num_prefill_cached: int,
    num_decode_cached: int,
) -> _Work:
    split, num_layers = visibility.split(num_prompt), shape.num_layers
    depth = visibility.depth(num_layers)
    num_upper, num_prefill = num_layers - depth, split.num_prefill_tokens
    num_run = max(0, num_prefill - num_prefill_cached) if num_decode_cached < num_prefill else 0
    num_new_anchors = max(0, split.num_anchor_tokens - num_decode_cached)
    is_pop = visibility.kind is VisibilityKind.POP
    num_decode = num_decode_tokens(visibility, num_prompt, num_generated)
    return _Work(
        num_run=num_run,
        num_new_anchors=num_new_anchors,
        num_decode=num_decode,
        num_projected_early=num_run * num_upper if is_pop and not visibility.late else 0,
        num_projected_late=max(0, num_prefill - num_decode_cached) * num_upper if is_pop and visibility.late else 0,
        prefill_token_layers=num_run * depth,
        decode_token_layers=num_new_anchors * num_upper + num_decode * num_layers,
    )


def _token_layers(shape: ModelShape, num_token_layers: int, num_projected: int) -> int:
    """A K/V projection counts as its share of a layer's weights."""
    if not num_projected:
        return num_token_layers
    return num_token_layers + round(num_projected * kv_projection_weights(shape) / layer_weights(shape))


def kv_layer_tokens_read(shape: ModelShape, visibility: Visibility, num_prompt_tokens: int, num_decode_tokens: int) -> int:
    """(token, layer) pairs of KV that the request's latest decode token reads, t decode tokens (its own included) being run.

    Lower layers S_l(P + t); upper layers the same for `full` and `pop`, the anchors in reach and S_l(t) for `speed`; S_l(n) is
    n in a global layer and min(n, w) in a window layer.
    """
    split, depth = visibility.split(num_prompt_tokens), visibility.depth(shape.num_layers)
    num_positions = split.num_prefill_tokens + num_decode_tokens
    total = 0
    for layer in range(shape.num_layers):
        window = shape.window(layer)
        if layer < depth or visibility.kind is not VisibilityKind.SPEED:
            total += num_positions if window is None else min(num_positions, window)
            continue
        total += num_decode_tokens if window is None else min(num_decode_tokens, window)
        hidden = 0 if window is None or visibility.sink else max(0, num_positions - window)
        total += max(0, split.num_anchor_tokens - hidden)
    return total


def _anchor_pairs(num_anchors: int, num_prefill: int, num_decode: int, window: int | None) -> int:
    """(decode query, anchor) pairs of an upper `speed` layer: by position, all of them without a window."""
    if window is None:
        return num_anchors * num_decode
    # the query at P + i sees min(α, max(0, visible − i)) anchors
    visible = num_anchors + window - 1 - num_prefill
    num_whole = min(max(0, visible - num_anchors + 1), num_decode)
    first = max(0, visible - num_whole)
    num_falling = min(num_decode - num_whole, first)
    return num_whole * num_anchors + num_falling * first - num_falling * (num_falling - 1) // 2
