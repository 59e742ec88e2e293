"""Design §2 "Arithmetic": the plan's sum equals the formula, the formula equals hand counts, reservations hold what is run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidRequest
from shoal.placement import arithmetic
from shoal.placement.blocks import BlockPool
from shoal.placement.plan import EntryKind, make_plan
from shoal.placement.reservation import (
    check_fits_ever,
    decode_reservation,
    fits_ever,
    largest_max_tokens,
    prefill_reservation,
)
from shoal.placement.tables import KvLayout, RequestTables
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility, VisibilityKind


def make_shape(num_layers: int = 4, windows: tuple[int | None, ...] = (), hidden: int = 6, kv_heads: int = 2) -> ModelShape:
    return ModelShape(num_layers, hidden, 4, kv_heads, 3, 16, 50, 4096, windows)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    num_layers = draw(st.integers(1, 6))
    windows = draw(st.just(()) | st.tuples(*[st.none() | st.integers(1, 40)] * num_layers))
    return make_shape(num_layers, windows, draw(st.integers(1, 40)), draw(st.integers(1, 3)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelShape, Visibility, int, int]:
    """(shape, resolved visibility, N, c) with N ≤ b, a > P, K = 1, K = L and c = P all likely."""
    shape = draw(shapes())
    kind = draw(st.sampled_from(VisibilityKind))
    boundary = draw(st.none() | st.integers(1, 9))
    if kind is VisibilityKind.FULL:
        visibility = Visibility(boundary_tokens=boundary)
    else:
        depth = draw(st.integers(1, shape.num_layers))
        speed = kind is VisibilityKind.SPEED
        visibility = Visibility(
            kind,
            depth,
            anchor_tokens=draw(st.integers(0, 12)) if speed else 0,
            boundary_tokens=boundary,
            late=not speed and draw(st.booleans()),
            sink=speed and draw(st.booleans()),
        )
    visibility = visibility.resolve(shape.num_layers, draw(st.integers(1, 4)))
    num_prompt = draw(st.integers(1, 60))
    num_prefill = visibility.split(num_prompt).num_prefill_tokens
    return shape, visibility, num_prompt, draw(st.integers(0, num_prefill) | st.just(num_prefill))


@given(cases(), st.sampled_from(DType), st.integers(1, 500), st.integers(1, 30))
def test_the_plan_sums_to_the_formula(
    case: tuple[ModelShape, Visibility, int, int], dtype: DType, size: int, tokens: int
) -> None:
    shape, visibility, num_prompt, cached = case
    plan = make_plan(shape, dtype, visibility, num_prompt, cached, max_entry_bytes=size, max_entry_tokens=tokens)
    assert plan.num_bytes == arithmetic.wire_bytes(shape, dtype, visibility, num_prompt, cached)
    states = sum(entry.num_bytes for entry in plan.entries if entry.kind is EntryKind.DEEP_STATE)
    assert states == arithmetic.deep_state_bytes(shape, dtype, visibility, num_prompt, cached)
    full = arithmetic.full_depth_wire_bytes(shape, dtype, visibility, num_prompt, cached)
    if visibility.kind is VisibilityKind.FULL or (visibility.kind is VisibilityKind.POP and not visibility.late):
        assert plan.num_bytes == full
    assert plan.num_bytes - states <= full


@given(cases(), st.integers(1, 500), st.integers(1, 30))
def test_plan_entries_are_whole_disjoint_and_bounded(
    case: tuple[ModelShape, Visibility, int, int], size: int, tokens: int
) -> None:
    shape, visibility, num_prompt, cached = case
    plan = make_plan(shape, DType.BFLOAT16, visibility, num_prompt, cached, max_entry_bytes=size, max_entry_tokens=tokens)
    seen: set[tuple[EntryKind, int, int]] = set()
    for index, entry in enumerate(plan.entries):
        assert entry.index == index and cached <= entry.start < entry.stop
        assert entry.num_tokens <= tokens and (entry.num_bytes <= size or entry.num_tokens == 1)
        cells = {(entry.kind, entry.layer, token) for token in range(entry.start, entry.stop)}
        assert not cells & seen
        seen |= cells
    again = make_plan(shape, DType.BFLOAT16, visibility, num_prompt, cached, max_entry_bytes=size, max_entry_tokens=tokens)
    assert again == plan


@given(cases())
def test_every_key_a_decode_query_sees_is_shipped_or_cached(case: tuple[ModelShape, Visibility, int, int]) -> None:
    """Independent of both formulas: walk the first decode query over each layer by the words of design §2."""
    shape, visibility, num_prompt, cached = case
    split, depth = visibility.split(num_prompt), visibility.depth(shape.num_layers)
    due: set[tuple[EntryKind, int, int]] = set()
    for layer in range(shape.num_layers):
        for token in range(cached, split.num_prefill_tokens):
            window = shape.window(layer)
            visible = window is None or token > split.num_prefill_tokens - window
            if layer < depth or (visibility.kind is VisibilityKind.POP and not visibility.late):
                if visible:
                    due.add((EntryKind.KV, layer, token))
            elif (visibility.late and visible) or (visibility.kind is VisibilityKind.SPEED and token < split.num_anchor_tokens):
                due.add((EntryKind.DEEP_STATE, depth, token))
    plan = make_plan(shape, DType.FLOAT32, visibility, num_prompt, cached, max_entry_bytes=64, max_entry_tokens=7)
    shipped = {(e.kind, e.layer, token) for e in plan.entries for token in range(e.start, e.stop)}
    assert shipped == due


@pytest.mark.parametrize(
    ("text", "num_prompt", "cached", "num_kv", "num_states"),
    [
        # L = 4; KV counted in (token, layer) pairs
        ("full", 11, 0, 10 * 4, 0),
        ("full:boundary=11", 11, 0, 0, 0),  # P = 0
        ("full:boundary=20", 11, 0, 0, 0),  # N ≤ b
        ("speed:2", 11, 0, 10 * 2, 1),
        ("speed:2:anchors=0", 11, 0, 10 * 2, 0),
        ("speed:1:anchors=3", 11, 0, 10, 3),
        ("speed:1:anchors=99", 11, 0, 10, 10),  # a > P: α = P
        ("speed:3:anchors=4", 11, 2, 8 * 3, 2),  # two anchors cached
        ("speed:3:anchors=4", 11, 10, 0, 0),  # c = P
        ("speed:4:anchors=4", 11, 0, 10 * 4, 0),  # K = L is full
        ("pop:2", 11, 0, 10 * 4, 0),
        ("pop:2:late", 11, 0, 10 * 2, 10),
        ("pop:2:late:boundary=3", 11, 5, 3 * 2, 3),
        ("pop:4:late", 11, 0, 10 * 4, 0),
    ],
)
def test_wire_bytes_by_hand(text: str, num_prompt: int, cached: int, num_kv: int, num_states: int) -> None:
    shape = make_shape()
    visibility = Visibility.parse(text).resolve(shape.num_layers)
    expected = num_kv * 2 * 2 * 3 * 2 + num_states * 6 * 2  # bf16: kv = 2 · 2 heads · 3 dims, h = 6
    assert arithmetic.wire_bytes(shape, DType.BFLOAT16, visibility, num_prompt, cached) == expected


@pytest.mark.parametrize(
    ("text", "num_kv", "num_states"),
    [
        ("full", 3 + 10 + 0 + 10, 0),  # min(T, w−1): w = 4, none, 1 (sees itself only), 100 > T
        ("speed:2:anchors=7", 3 + 10, 7),  # anchors ship whole
        ("pop:2", 3 + 10 + 0 + 10, 0),
        ("pop:2:late", 3 + 10, 10),  # the largest T of the upper layers
        ("pop:3:late", 3 + 10 + 0, 10),
    ],
)
def test_windows_by_hand(text: str, num_kv: int, num_states: int) -> None:
    shape = make_shape(windows=(4, None, 1, 100))
    visibility = Visibility.parse(text).resolve(shape.num_layers)
    expected = num_kv * 12 * 4 + num_states * 6 * 4
    assert arithmetic.wire_bytes(shape, DType.FLOAT32, visibility, 11) == expected


def test_saved_share_tends_to_the_skipped_layers() -> None:
    shape = make_shape(num_layers=8, hidden=64)
    visibility = Visibility.parse("speed:6").resolve(8)
    shares = [arithmetic.saved_share(shape, DType.BFLOAT16, visibility, n) for n in (2, 10, 100, 10_000, 1_000_000)]
    assert shares == sorted(shares) and shares[-1] < 2 / 8
    assert shares[-1] == pytest.approx(2 / 8, abs=1e-5)
    assert arithmetic.saved_share(shape, DType.BFLOAT16, visibility, 1) == 0.0


def test_late_ships_less_where_the_design_says() -> None:
    shape = make_shape(num_layers=8, hidden=36)  # kv = 12: h·e < (L−K)·kv·e from four skipped layers on
    assert not arithmetic.late_ships_less(shape, DType.BFLOAT16, 5)
    assert arithmetic.late_ships_less(shape, DType.BFLOAT16, 4)
    for depth in range(1, 8):
        plain, late = (Visibility.parse(f"pop:{depth}{end}").resolve(8) for end in ("", ":late"))
        less = arithmetic.wire_bytes(shape, DType.BFLOAT16, late, 50) < arithmetic.wire_bytes(shape, DType.BFLOAT16, plain, 50)
        assert less == arithmetic.late_ships_less(shape, DType.BFLOAT16, depth)


@given(cases(), st.integers(0, 9))
def test_decode_kv_counts_the_slots_the_layout_fills(case: tuple[ModelShape, Visibility, int, int], generated: int) -> None:
    shape, visibility, num_prompt, _ = case
    layout = KvLayout.of(shape.num_layers, visibility, num_prompt)
    num_tokens = num_prompt + max(0, generated - 1)
    is_dense = visibility.kind is VisibilityKind.SPEED

    def seen(layer: int) -> range:  # by the next query; dense layers keep all they have
        window = None if is_dense and layer in layout.upper_layers else shape.window(layer)
        return range(0 if window is None else max(0, num_tokens - window + 1), num_tokens)

    slots = {(layer, position) for layer in layout.lower_layers for position in seen(layer)}
    for layer in layout.upper_layers:
        for position in seen(layer):
            hidden = layout.split.num_anchor_tokens <= position < layout.split.num_prefill_tokens
            if not (hidden and is_dense):
                slots.add((layer, layout.upper_slot(position)))
    assert arithmetic.decode_kv_layer_tokens(shape, visibility, num_prompt, generated) == len(slots)


@given(cases(), st.integers(1, 20), st.integers(0, 9), st.integers(1, 8))
def test_reservations_are_what_the_tables_take(
    case: tuple[ModelShape, Visibility, int, int], max_tokens: int, replayed: int, block_size: int
) -> None:
    shape, visibility, num_prompt, cached = case
    layout = KvLayout.of(shape.num_layers, visibility, num_prompt)
    split = layout.split
    decode = decode_reservation(
        shape, DType.FLOAT32, block_size, visibility, num_prompt, max_tokens, num_replay_tokens=replayed, num_cached_tokens=cached
    )
    r = replayed + max_tokens - 1
    assert decode.num_lower_slots == num_prompt + r
    if not layout.upper_layers:
        assert decode.num_upper_slots == 0
    elif visibility.kind is VisibilityKind.SPEED:
        assert decode.num_upper_slots == split.num_anchor_tokens + (num_prompt - split.num_prefill_tokens) + r
    else:
        assert decode.num_upper_slots == num_prompt + r
    prefill = prefill_reservation(shape, DType.FLOAT32, block_size, visibility, num_prompt, num_cached_tokens=cached)
    assert prefill.num_lower_slots == split.num_prefill_tokens
    plain_pop = layout.upper_layers and visibility.kind is VisibilityKind.POP and not visibility.late
    assert prefill.num_upper_slots == (split.num_prefill_tokens if plain_pop else 0)
    assert prefill.num_deep_state_bytes == arithmetic.deep_state_bytes(shape, DType.FLOAT32, visibility, num_prompt, cached)

    pool = BlockPool(2000)
    for size in (decode, prefill):
        tables = RequestTables(pool, block_size, layout)
        tables.reserve(size.num_lower_slots, size.num_upper_slots)
        assert pool.num_used == size.num_blocks
        tables.release()


@given(cases(), st.integers(0, 3), st.integers(1, 8), st.integers(0, 400))
def test_largest_max_tokens_is_the_last_that_fits(
    case: tuple[ModelShape, Visibility, int, int], replayed: int, block_size: int, num_pool_blocks: int
) -> None:
    shape, visibility, num_prompt, _ = case
    largest = largest_max_tokens(shape, block_size, visibility, num_prompt, num_pool_blocks, num_replay_tokens=replayed)

    def fits(max_tokens: int) -> bool:
        size = decode_reservation(
            shape, DType.BFLOAT16, block_size, visibility, num_prompt, max_tokens, num_replay_tokens=replayed
        )
        return fits_ever(size, num_pool_blocks)

    assert largest >= 0 and not fits(largest + 1)
    assert largest == 0 or fits(largest)


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    shape = make_shape()
    visibility = Visibility.parse("full").resolve(4)
    size = decode_reservation(shape, DType.BFLOAT16, 16, visibility, 100, 50)
    assert size.num_blocks == 4 * 10  # 149 slots
    check_fits_ever(size, 40)
    largest = largest_max_tokens(shape, 16, visibility, 100, 39)
    assert largest == 45  # 9 blocks per layer = 144 slots, the last token needs none
    with pytest.raises(InvalidRequest, match=r"needs 40 KV blocks .* has 39 in all; .*max_tokens to at most 45"):
        check_fits_ever(size, 39, max_tokens_that_fit=largest)
    with pytest.raises(InvalidRequest, match="shorten the prompt, or give the worker a larger KV pool"):
        check_fits_ever(size, 4, max_tokens_that_fit=0)
    late = decode_reservation(shape, DType.BFLOAT16, 16, Visibility.parse("pop:2:late").resolve(4), 100, 1)
    assert late.num_deep_state_bytes == 99 * 6 * 2
    with pytest.raises(InvalidRequest, match="keeps 1188 bytes of hidden states and the worker allows 1000"):
        check_fits_ever(late, 40, max_deep_state_bytes=1000)
