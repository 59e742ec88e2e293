"""Predicted waits and refusals, and a worker's stall: pure."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.placement.admission import ComputeReport, RoomReport, WaitBounds
from shoal.placement.stall import StallWatch, Standing
from shoal.types import Priority

LOW, NORMAL, HIGH = Priority
FULL = RoomReport("decode-0", 90, 100, 9, 64, ((NORMAL, 4, 40), (LOW, 2, 30)), mean_hold_s=5.0)


def test_a_wait_for_room_is_what_must_come_free_before_by_the_pace_of_a_full_pool() -> None:
    assert FULL.wait_s(NORMAL, 20) == pytest.approx(5.0 * (90 + 40 + 20 - 100) / 100)
    assert FULL.wait_s(LOW, 20) == pytest.approx(5.0 * (90 + 70 + 20 - 100) / 100)
    assert FULL.wait_s(HIGH, 20) == pytest.approx(5.0 * (90 + 20 - 100) / 100)
    assert FULL.wait_s(HIGH, 10) == 0  # it fits
    assert FULL.wait_s(NORMAL, 101) == 0  # never: the worker says so
    places = dataclasses.replace(FULL, num_used_blocks=0, num_holders=64)
    assert places.wait_s(HIGH, 1) == pytest.approx(5.0 / 64) and places.wait_s(NORMAL, 1) == pytest.approx(25.0 / 64)
    unknown = RoomReport("decode-0", 0, 0, 0, 0, (), 0.0)
    assert unknown.wait_s(NORMAL, 5) == 0


def test_a_wait_for_compute_counts_one_s_own_class_and_those_above() -> None:
    queue = ComputeReport("prefill-0", ((NORMAL, 1000), (HIGH, 500), (NORMAL, 200)), 100.0)
    assert (queue.wait_s(HIGH), queue.wait_s(NORMAL), queue.wait_s(LOW)) == (5.0, 17.0, 17.0)
    assert ComputeReport("prefill-0", ((NORMAL, 1000),), 0.0).wait_s(NORMAL) == 0


def test_there_is_room_to_spare_where_half_of_a_worker_stays_free() -> None:
    idle = RoomReport("decode-0", 0, 100, 0, 64, (), 0.0)
    assert idle.has_spare(50) and not idle.has_spare(51)
    assert dataclasses.replace(idle, num_holders=31).has_spare(1) and not dataclasses.replace(idle, num_holders=32).has_spare(1)
    assert dataclasses.replace(idle, max_holders=1).has_spare(1) and not dataclasses.replace(
        idle, max_holders=2, num_holders=1
    ).has_spare(1)
    waiting = dataclasses.replace(idle, num_used_blocks=20, waiting=((HIGH, 1, 20),))
    assert waiting.has_spare(10) and not waiting.has_spare(11)
    assert not RoomReport("decode-0", 0, 0, 0, 0, (), 0.0).has_spare(1)  # nothing is known of it
    assert ComputeReport("p", ((HIGH, 25),), 100.0).has_spare() and not ComputeReport("p", ((LOW, 26),), 100.0).has_spare()


def test_a_refusal_says_what_is_full_and_when_to_come_back() -> None:
    error = WaitBounds(10.0, 60.0).refusal(23.4, FULL.words(NORMAL))
    assert error.retry_after_s == 14 and str(error) == (
        "no room now: the request would wait about 23.4 s for its start, beyond the limit of 10 s (decode worker decode-0: 90 of "
        "100 KV blocks used, 9 of 64 places taken, 4 requests before it wait for 40); retry in 14 s"
    )
    assert WaitBounds(10.0, -1.0).bound_s == 0
    late = WaitBounds(math.inf, 3.0).refusal(3.5, ComputeReport("prefill-1", ((NORMAL, 350),), 100.0).words(NORMAL))
    assert late.retry_after_s == 1 and "later than its own deadline, 3.0 s from now (prefill worker prefill-1: 350" in str(late)


reports = st.builds(
    RoomReport,
    st.just("w"),
    st.integers(0, 100),
    st.just(100),
    st.integers(0, 20),
    st.just(20),
    st.lists(st.tuples(st.sampled_from(list(Priority)), st.integers(0, 9), st.integers(0, 300)), max_size=5).map(tuple),
    st.floats(0, 100),
)


@given(reports, st.integers(1, 100))
def test_a_higher_class_never_waits_longer_and_more_ahead_never_shortens_a_wait(report: RoomReport, num_blocks: int) -> None:
    waits = [report.wait_s(priority, num_blocks) for priority in Priority]
    assert waits == sorted(waits, reverse=True) and waits[-1] >= 0
    more = dataclasses.replace(report, waiting=(*report.waiting, (NORMAL, 1, 10)))
    assert more.wait_s(NORMAL, num_blocks) >= report.wait_s(NORMAL, num_blocks)
    assert more.wait_s(HIGH, num_blocks) == report.wait_s(HIGH, num_blocks)


def stands(num_moves: int, *, running: int = 0, waiting: int = 0, transferring: int = 0) -> Standing:
    return Standing(num_moves, running, waiting, transferring)


@pytest.mark.parametrize(
    ("standing", "ill"),
    [
        (stands(7), False),  # idle
        (stands(7, waiting=3), True),  # who holds the blocks is gone
        (stands(7, running=1), True),  # a step hangs
        (stands(7, waiting=3, transferring=2), False),  # a slow peer: heartbeat and lease watch it
        (stands(7, running=1, transferring=2), True),
    ],
)
def test_ill_is_who_should_move_and_does_not(standing: Standing, ill: bool) -> None:
    watch = StallWatch(10.0)
    assert not watch.is_ill(standing, 100.0) and not watch.is_ill(standing, 109.9)
    assert watch.is_ill(standing, 110.0) is ill
    moved = dataclasses.replace(standing, num_moves=8)
    assert not watch.is_ill(moved, 111.0) and watch.is_ill(moved, 121.0) is ill
    assert not watch.is_ill(stands(8), 122.0) and not watch.is_ill(moved, 131.9)
