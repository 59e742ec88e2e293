"""Cost of a request: token-layers and FLOPs against hand counts and a walk over every query, seconds against the formulas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.placement.cost import causal_pairs, kv_layer_tokens_read, kv_projection_weights, layer_weights, request_cost
from shoal.placement.seconds import Rates, decode_step_seconds, prefill_seconds, request_seconds
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility, VisibilityKind

SHAPE = ModelShape(4, 8, 4, 2, 2, 16, 50, 4096)
LLAMA_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 131072)
RATES = Rates(1e12, 5e11, 1e11, 2e11, num_half_tokens=10, layer_s=1e-5, step_s=1e-3)


def resolved(text: str, num_layers: int = 4) -> Visibility:
    return Visibility.parse(text).resolve(num_layers)


def test_weights_of_a_known_model() -> None:
    assert layer_weights(LLAMA_8B) == 218_103_808  # 32 of these, embedding and head make 8.03 billion
    assert kv_projection_weights(LLAMA_8B) == 2 * 4096 * 1024
    assert 32 * layer_weights(LLAMA_8B) + 2 * 4096 * 128256 == pytest.approx(8.03e9, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "prefill", "decode"),
    [
        # N = 11, g = 3: P = 10, t = 1 + 2; p = 8·8·2 + 8·8 + 3·8·16 = 576, p_kv = 64: a projection is 1/9 of a layer
        ("full", 40, 12),
        ("speed:3", 30, 1 + 12),
        ("speed:2:anchors=4", 20, 8 + 12),
        ("speed:1:anchors=99", 10, 30 + 12),
        ("pop:2", 20 + 2, 12),  # 20 projections: 20/9
        ("pop:2:late", 20, 12 + 2),
        ("full:boundary=11", 0, 52),
        ("speed:2:boundary=20", 0, 52),
    ],
)
def test_token_layers_by_hand(text: str, prefill: int, decode: int) -> None:
    cost = request_cost(SHAPE, resolved(text), 11, 3)
    assert (cost.prefill.token_layers, cost.decode.token_layers) == (prefill, decode)


def test_cached_prefixes() -> None:
    speed = resolved("speed:2:anchors=4")
    assert request_cost(SHAPE, speed, 11, 3, num_prefill_cached=6).prefill.token_layers == 8
    some = request_cost(SHAPE, speed, 11, 3, num_decode_cached=3)
    assert (some.prefill.token_layers, some.decode.token_layers) == (20, 2 + 12)
    whole = request_cost(SHAPE, speed, 11, 3, num_decode_cached=10)
    assert whole.prefill.flops == 0 and whole.decode.token_layers == 12


def test_prefill_flops_shrink_with_depth() -> None:
    full, shallow = (request_cost(LLAMA_8B, resolved(text, 32), 2048, 1).prefill for text in ("full", "speed:24"))
    assert shallow.flops / full.flops == 24 / 32
    assert full.linear_flops == 2 * 2047 * 32 * layer_weights(LLAMA_8B)
    assert full.attention_flops == 32 * 4 * 32 * 128 * causal_pairs(2047)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelShape, Visibility, int, int, int]:
    num_layers = draw(st.integers(1, 3))
    windows = draw(st.just(()) | st.tuples(*[st.none() | st.integers(1, 20)] * num_layers))
    kind = draw(st.sampled_from(VisibilityKind))
    speed = kind is VisibilityKind.SPEED
    visibility = Visibility(
        kind,
        None if kind is VisibilityKind.FULL else draw(st.integers(1, num_layers)),
        anchor_tokens=draw(st.integers(0, 9)) if speed else 0,
        boundary_tokens=draw(st.integers(1, 6)),
        sink=speed and draw(st.booleans()),
    ).resolve(num_layers)
    num_prompt = draw(st.integers(1, 30))
    cached = draw(st.integers(0, visibility.split(num_prompt).num_prefill_tokens))
    return ModelShape(num_layers, 8, 4, 2, 2, 16, 50, 4096, windows), visibility, num_prompt, draw(st.integers(1, 25)), cached


@given(cases())
def test_attention_counts_every_visible_pair(case: tuple[ModelShape, Visibility, int, int, int]) -> None:
    """Walks each query of each layer by the words of design §2."""
    shape, visibility, num_prompt, generated, cached = case
    split, depth = visibility.split(num_prompt), visibility.depth(shape.num_layers)
    num_prefill, num_tokens = split.num_prefill_tokens, num_prompt + generated - 1
    speed = visibility.kind is VisibilityKind.SPEED

    def keys(layer: int, query: int) -> int:
        window = shape.window(layer)
        total = 0
        for key in range(query + 1):
            anchor = key < split.num_anchor_tokens
            if layer >= depth and speed and not anchor and key < num_prefill:
                continue
            near = window is None or key > query - window
            total += near or (visibility.sink and layer >= depth and anchor)
        return total

    prefill = sum(keys(layer, query) for layer in range(depth) for query in range(num_prefill))
    decode = sum(keys(layer, query) for layer in range(shape.num_layers) for query in range(num_prefill, num_tokens))
    if speed:
        decode += sum(keys(layer, q) for layer in range(depth, shape.num_layers) for q in range(cached, split.num_anchor_tokens))
    cost = request_cost(shape, visibility, num_prompt, generated, num_decode_cached=cached)
    unit = 4 * shape.num_heads * shape.head_dim
    assert cost.decode.attention_flops == unit * decode
    assert cost.prefill.attention_flops == (unit * prefill if cached < num_prefill else 0)
    last = sum(keys(layer, num_tokens - 1) for layer in range(shape.num_layers))
    assert kv_layer_tokens_read(shape, visibility, num_prompt, num_tokens - num_prefill) == last


def test_seconds_follow_the_formulas() -> None:
    visibility = resolved("speed:3")
    cost = request_cost(SHAPE, visibility, 101, 4)
    weights = 3 * layer_weights(SHAPE)
    linear = 2 * 100 * weights / (1e12 * 100 / 110)
    expected = max(linear, weights * 4 / 1e11) + cost.prefill.attention_flops / 5e11 + 3e-5 + 1e-3
    got = prefill_seconds(SHAPE, DType.FLOAT32, visibility, cost.prefill, RATES, num_tokens=100)
    assert got == pytest.approx(expected, rel=1e-12)
    chunked = prefill_seconds(SHAPE, DType.FLOAT32, visibility, cost.prefill, RATES, num_tokens=100, num_chunks=4)
    assert chunked > got + 3 * (3e-5 + 1e-3)

    num_weights = 4 * layer_weights(SHAPE) + 8 * 50
    step = decode_step_seconds(SHAPE, DType.BFLOAT16, 7, 1000, RATES)
    expected = max(num_weights * 2 / 1e11, 2 * 7 * num_weights / 1e12) + 1000 * 8 * 2 / 2e11 + 4e-5 + 1e-3
    assert step == pytest.approx(expected, rel=1e-12)

    parts = request_seconds(SHAPE, DType.BFLOAT16, visibility, 101, 4, RATES)
    reads = [kv_layer_tokens_read(SHAPE, visibility, 101, t) for t in (2, 3, 4)]
    assert reads == [3 * (100 + t) + 1 + t for t in (2, 3, 4)]
    assert parts.later_steps_s == pytest.approx(sum(decode_step_seconds(SHAPE, DType.BFLOAT16, 1, r, RATES) for r in reads))
    assert parts.prefill_s > 0 and parts.first_step_s > 1e-3
    assert request_seconds(SHAPE, DType.BFLOAT16, resolved("full:boundary=101"), 101, 1, RATES).prefill_s == 0.0


def test_published_ratio_of_time_to_first_token_at_long_prompts() -> None:
    """SPEED's TTFT gain on Llama-3.1-8B at 128K tokens, K = 24 of 32, tends to 32/24 (their paper reports 1.33×)."""
    rates = Rates(4e14, 3e14, 2e12, 2e12)
    full, speed = (request_seconds(LLAMA_8B, DType.BFLOAT16, resolved(t, 32), 131072, 1, rates) for t in ("full", "speed:24"))
    assert (full.prefill_s + full.first_step_s) / (speed.prefill_s + speed.first_step_s) == pytest.approx(4 / 3, rel=2e-3)


@pytest.mark.parametrize(
    "bad", [{"linear_flops_per_s": 0.0}, {"kv_bytes_per_s": -1.0}, {"step_s": -1.0}, {"layer_s": float("nan")}]
)
def test_rates_must_make_sense(bad: dict[str, float]) -> None:
    good = {"linear_flops_per_s": 1.0, "attention_flops_per_s": 1.0, "weight_bytes_per_s": 1.0, "kv_bytes_per_s": 1.0}
    with pytest.raises(ValueError, match="rates must be positive"):
        Rates(**{**good, **bad})
