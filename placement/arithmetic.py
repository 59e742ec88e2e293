"""Bytes on the wire and KV held, by the formulas of design §2 "Arithmetic". Knows shapes and counts; knows no plan, no tensors.

Engine, transfer, router, admission and simulator all call these. The transfer plan is made independently (placement/plan.py);
tests hold its sum to `wire_bytes`. Every visibility given here is resolved.
"""

from shoal.types import DType, ModelShape
from shoal.visibility import Visibility, VisibilityKind


def kv_bytes(shape: ModelShape, dtype: DType, num_layer_tokens: int) -> int:
    """Bytes of K and V of `num_layer_tokens` (token, layer) pairs: kv · e each."""
    return num_layer_tokens * shape.kv_elements * dtype.num_bytes


def num_decode_tokens(visibility: Visibility, num_prompt_tokens: int, num_generated_tokens: int) -> int:
    """t = (N − P) + max(0, g − 1): tokens that decode runs at full depth. The last sampled token is never run."""
    num_boundary = num_prompt_tokens - visibility.split(num_prompt_tokens).num_prefill_tokens
    return num_boundary + max(0, num_generated_tokens - 1)


def deep_state_bytes(
    shape: ModelShape, dtype: DType, visibility: Visibility, num_prompt_tokens: int, num_cached_tokens: int = 0
) -> int:
    """Bytes of the hidden states that cross: anchors c … α−1 whole (`speed`), what some upper layer still sees (late `pop`)."""
    num_states = num_deep_states(shape, visibility, num_prompt_tokens, num_cached_tokens)
    return num_states * shape.hidden_size * dtype.num_bytes


def num_deep_states(shape: ModelShape, visibility: Visibility, num_prompt_tokens: int, num_cached_tokens: int = 0) -> int:
    """Hidden states that cross, as in `deep_state_bytes`."""
    depth = visibility.depth(shape.num_layers)
    split = visibility.split(num_prompt_tokens)
    if depth == shape.num_layers:
        return 0
    if visibility.kind is VisibilityKind.SPEED:
        return max(0, split.num_anchor_tokens - num_cached_tokens)
    if visibility.late:
        num_due = max(0, split.num_prefill_tokens - num_cached_tokens)
        return max(num_shipped_tokens(shape, layer, num_due) for layer in range(depth, shape.num_layers))
    return 0


def wire_bytes(
    shape: ModelShape, dtype: DType, visibility: Visibility, num_prompt_tokens: int, num_cached_tokens: int = 0
) -> int:
    """Payload bytes of one handoff, T = P − c.

    `full`, `pop`: T·L·kv·e. `speed`: T·K·kv·e + max(0, α − c)·h·e. Late `pop`: T·(K·kv·e + h·e). KV terms are summed per
    layer, with min(T, w−1) for T in a window layer.
    """
    num_due = max(0, visibility.split(num_prompt_tokens).num_prefill_tokens - num_cached_tokens)
    kv_layers = shipped_kv_layers(shape, visibility)
    num_layer_tokens = sum(num_shipped_tokens(shape, layer, num_due) for layer in kv_layers)
    states = deep_state_bytes(shape, dtype, visibility, num_prompt_tokens, num_cached_tokens)
    return kv_bytes(shape, dtype, num_layer_tokens) + states


def full_depth_wire_bytes(
    shape: ModelShape, dtype: DType, visibility: Visibility, num_prompt_tokens: int, num_cached_tokens: int = 0
) -> int:
    """What the same prefill tokens would ship if every layer's KV crossed: T·L·kv·e, windows as in `wire_bytes`."""
    full = Visibility(boundary_tokens=visibility.boundary_tokens)
    return wire_bytes(shape, dtype, full, num_prompt_tokens, num_cached_tokens)


def saved_share(
    shape: ModelShape, dtype: DType, visibility: Visibility, num_prompt_tokens: int, num_cached_tokens: int = 0
) -> float:
    """1 − wire / full-depth wire, which tends to (L−K)/L as P grows under `speed`. 0.0 when nothing crosses.

    Negative where the deep states weigh more than the KV they replace, as they may for few or cached tokens.
    """
    arguments = (shape, dtype, visibility, num_prompt_tokens, num_cached_tokens)
    full = full_depth_wire_bytes(*arguments)
    return 1.0 - wire_bytes(*arguments) / full if full else 0.0


def late_ships_less(shape: ModelShape, dtype: DType, prefill_layers: int) -> bool:
    """Whether late `pop` ships less than plain `pop` at depth K: h·e < (L−K)·kv·e (no windows)."""
    return shape.hidden_size * dtype.num_bytes < kv_bytes(shape, dtype, shape.num_layers - prefill_layers)


def decode_kv_layer_tokens(shape: ModelShape, visibility: Visibility, num_prompt_tokens: int, num_generated_tokens: int) -> int:
    """(token, layer) pairs of KV on the decode side after g tokens, t = (N − P) + max(0, g − 1).

    `speed`: P·K + α·(L−K) + t·L. `full`, `pop`: (P + t)·L. The last sampled token has no KV. A window layer holds what the next
    query sees, min(P + t, w − 1) and the rest of a block; above K `speed` keeps its α + t tokens in window layers too.
    """
    split, num_layers = visibility.split(num_prompt_tokens), shape.num_layers
    num_prefill, depth = split.num_prefill_tokens, visibility.depth(num_layers)
    num_decode = num_decode_tokens(visibility, num_prompt_tokens, num_generated_tokens)
    is_speed = visibility.kind is VisibilityKind.SPEED
    num_dense = num_layers - depth if is_speed else 0  # layers that hold anchors and decode tokens alone
    num_seen = num_prefill + num_decode
    below = sum(num_shipped_tokens(shape, layer, num_seen) for layer in range(num_layers - num_dense))
    return below + (split.num_anchor_tokens + num_decode) * num_dense


def shipped_kv_layers(shape: ModelShape, visibility: Visibility) -> range:
    """Layers whose KV crosses: all of them for plain `pop`, else the lower K."""
    ships_upper = visibility.kind is VisibilityKind.POP and not visibility.late
    return range(shape.num_layers if ships_upper else visibility.depth(shape.num_layers))


def num_shipped_tokens(shape: ModelShape, layer: int, num_due: int) -> int:
    """Tokens of one layer that a later query sees, which cross and are held: all T, or of a window layer min(T, w−1)."""
    window = shape.window(layer)
    return num_due if window is None else min(num_due, window - 1)
