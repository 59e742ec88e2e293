"""Batching: all work finishes, budgets hold, chunks respect P, rows come first and nobody starves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import AlreadyExists, InternalError
from shoal.placement.batching import Batcher, BatchingOptions, Chunk, TokenCursor


def cursor(key: str, known: int, *, prefill: int = 0, computed: int = 0) -> TokenCursor:
    return TokenCursor(key, prefill, known, computed)


def run(batcher: Batcher, budget: int, max_requests: int = 64) -> tuple[Chunk, ...]:
    step = batcher.next_step(budget, max_requests)
    for chunk in step:
        batcher.complete(chunk)
    return step


requests = st.lists(
    st.tuples(
        st.integers(0, 40),  # P
        st.integers(0, 12),  # decode tokens of the prompt
        st.integers(0, 45),  # computed before
        st.integers(0, 6),  # tokens to generate
    ),
    min_size=1,
    max_size=12,
)


@given(requests, st.integers(1, 30), st.integers(1, 14), st.integers(1, 20))
def test_everything_runs_once_in_order_under_the_limits(
    sizes: list[tuple[int, int, int, int]], budget: int, max_requests: int, min_chunk: int
) -> None:
    batcher = Batcher(BatchingOptions(min_chunk))
    to_generate: dict[str, int] = {}
    for index, (prefill, rest, computed, generated) in enumerate(sizes):
        known = prefill + rest
        batcher.add(TokenCursor(str(index), prefill, known, min(computed, known)))
        to_generate[str(index)] = generated
    work = batcher.num_pending_tokens + sum(n for key, n in to_generate.items() if batcher[key].num_pending)
    arrival = {str(index): index for index in range(len(sizes))}

    done = 0
    while batcher.has_work:
        before = {key: (batcher[key].num_computed, batcher[key].num_prefill_tokens) for key in arrival}
        is_row = {key: batcher[key].is_decode_row for key in arrival}
        step = batcher.next_step(budget, max_requests)
        assert step, "an empty step while work exists"
        assert sum(chunk.num_tokens for chunk in step) <= budget
        assert len(step) <= max_requests and len({chunk.key for chunk in step}) == len(step)
        kinds = [is_row[chunk.key] for chunk in step]
        assert kinds == sorted(kinds, reverse=True), "decode rows come first"
        chunk_order = [arrival[chunk.key] for chunk in step if not is_row[chunk.key]]
        assert chunk_order == sorted(chunk_order), "chunks are listed in arrival order"
        for chunk in step:
            computed, boundary = before[chunk.key]
            assert chunk.start == computed < chunk.stop <= batcher[chunk.key].num_known
            assert not chunk.start < boundary < chunk.stop, "a chunk crosses P"
            done += chunk.num_tokens
            batcher.complete(chunk)
            if not batcher[chunk.key].num_pending and to_generate[chunk.key]:
                to_generate[chunk.key] -= 1
                batcher.extend(chunk.key)
        assert done <= work
    assert done == work
    assert batcher.num_pending_tokens == 0 and batcher.next_step(budget, max_requests) == ()


def test_rows_then_chunks() -> None:
    batcher = Batcher()
    batcher.add(cursor("long", 100, prefill=99))
    batcher.add(cursor("row", 8, computed=7))
    batcher.add(cursor("short", 5))
    assert run(batcher, 200) == (Chunk("row", 7, 8), Chunk("long", 0, 99), Chunk("short", 0, 5))
    assert run(batcher, 200) == (Chunk("long", 99, 100),)  # the boundary token, in a step of its own


def test_a_one_token_prefill_piece_is_no_decode_row() -> None:
    assert not cursor("a", 1, prefill=1).is_decode_row
    assert cursor("a", 1, prefill=0).is_decode_row
    assert cursor("a", 10, prefill=9, computed=9).is_decode_row
    assert not cursor("a", 10, prefill=9, computed=10).is_decode_row


def test_short_prompts_pass_a_long_one_which_keeps_half() -> None:
    batcher = Batcher()
    batcher.add(cursor("long", 10_000))
    batcher.add(cursor("longer", 20_000))
    batcher.add(cursor("short", 40))
    step = {chunk.key: chunk.num_tokens for chunk in run(batcher, 128)}
    assert step["short"] == 40 and step["long"] >= 64


def test_a_piece_that_fits_is_not_halved() -> None:
    batcher = Batcher()
    batcher.add(cursor("a", 100))
    batcher.add(cursor("b", 100))
    assert run(batcher, 128) == (Chunk("a", 0, 100),)  # 28 tokens of b are under the minimum: b waits for a real share
    assert run(batcher, 128) == (Chunk("b", 0, 100),)


def test_an_endless_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    batcher = Batcher()
    batcher.add(cursor("long", 1000))
    for step in range(40):
        batcher.add(cursor(f"short{step}", 64))
        run(batcher, 64)
        if not batcher["long"].num_pending:
            break
    assert not batcher["long"].num_pending


@pytest.mark.parametrize(("budget", "max_requests"), [(1, 8), (8, 1), (2, 2), (4, 8), (16, 4)])
def test_endless_decode_rows_starve_neither_chunks_nor_each_other(budget: int, max_requests: int) -> None:
    batcher = Batcher()
    for index in range(20):
        batcher.add(cursor(f"row{index}", 11, computed=10))
    batcher.add(cursor("prompt", 50, prefill=49))
    counts = dict.fromkeys((f"row{index}" for index in range(20)), 0)
    for _ in range(600):
        for chunk in run(batcher, budget, max_requests):
            if chunk.key in counts:
                counts[chunk.key] += 1
                batcher.extend(chunk.key)
    assert not batcher["prompt"].num_pending
    assert min(counts.values()) > 0 and max(counts.values()) - min(counts.values()) <= 1


def test_new_rows_do_not_starve_old_ones() -> None:
    batcher = Batcher()
    batcher.add(cursor("old", 11, computed=10))
    num_runs = 0
    for step in range(30):
        for index in range(2):  # as many new rows in each step as fit
            batcher.add(cursor(f"new{step}.{index}", 5, computed=4))
        for chunk in run(batcher, 2):
            if chunk.key == "old":
                num_runs += 1
                batcher.extend("old")
    assert num_runs >= 5


def test_a_request_in_flight_is_not_chosen_again() -> None:
    batcher = Batcher()
    batcher.add(cursor("a", 10))
    (chunk,) = batcher.next_step(4, 8)
    assert not batcher.has_work and batcher.next_step(4, 8) == ()
    with pytest.raises(InternalError, match="not in flight"):
        batcher.complete(Chunk("a", 4, 8))
    batcher.complete(chunk)
    assert batcher["a"].num_computed == 4 and batcher.has_work


def test_removal_is_harmless_at_any_time() -> None:
    batcher = Batcher()
    batcher.remove("never here")
    batcher.add(cursor("a", 10))
    (chunk,) = batcher.next_step(4, 8)
    batcher.remove("a")
    batcher.remove("a")
    batcher.complete(chunk)
    assert len(batcher) == 0 and "a" not in batcher


def test_misuse_is_named() -> None:
    batcher = Batcher()
    batcher.add(cursor("a", 10))
    with pytest.raises(AlreadyExists, match="a is in the batch"):
        batcher.add(cursor("a", 10))
    with pytest.raises(InternalError, match="not in the batch"):
        batcher.extend("b")
    with pytest.raises(InternalError, match="unlearns"):
        batcher.extend("a", -1)
    with pytest.raises(InternalError, match="makes no sense"):
        cursor("a", 3, computed=4)
    with pytest.raises(ValueError, match="at least 1"):
        BatchingOptions(0)
    assert batcher.next_step(0, 8) == () and batcher.next_step(8, 0) == ()


def test_a_higher_rank_goes_first_and_the_earliest_still_gets_every_fourth_step() -> None:
    batcher = Batcher()
    batcher.add(TokenCursor("low", 400, 400, 0))
    for index in range(20):
        batcher.add(TokenCursor(f"high-{index}", 100, 100, 0, rank=2))
    steps = [run(batcher, 100) for _ in range(12)]
    assert [chunk.key for [chunk, *_] in steps[:3]] == ["high-0", "high-1", "high-2"]
    assert sum(chunk.num_tokens for step in steps for chunk in step if chunk.key == "low") >= 150
    assert [any(chunk.key == "low" for chunk in step) for step in steps].count(True) == 3


def test_background_requests_get_a_little_of_what_others_leave() -> None:
    batcher = Batcher()
    batcher.add(TokenCursor("b", 300, 300, 0, rank=2, is_background=True))
    batcher.add(TokenCursor("c", 0, 50, 49, is_background=True))
    assert run(batcher, 640) == (Chunk("b", 0, 40),)  # alone: a 16th
    batcher.add(TokenCursor("row", 0, 9, 8))
    batcher.add(TokenCursor("prompt", 1000, 1000, 0))
    assert run(batcher, 640) == (Chunk("row", 8, 9), Chunk("prompt", 0, 639))  # nothing is left
    assert run(batcher, 640) == (Chunk("prompt", 639, 1000), Chunk("b", 40, 50))  # a 64th beside others
    batcher.remove("b")
    assert run(batcher, 640) == (Chunk("c", 49, 50),) and not batcher.has_work
    batcher.add(TokenCursor("d", 0, 3, 0, is_background=True))
    assert [run(batcher, 1) for _ in range(3)] == [(Chunk("d", at, at + 1),) for at in range(3)]
