"""Who is let in next: classes by weight, tenants alike, long beside short, and nobody for ever behind others."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.placement.fair_queue import MAX_PASSED, FairQueue
from shoal.types import USUAL_TURN, Priority, Turn

HIGH, LOW = Turn(Priority.HIGH), Turn(Priority.LOW)


def drain(queue: FairQueue[str], num: int | None = None) -> list[str]:
    found: list[str] = []
    while (num is None or len(found) < num) and (item := queue.pop(lambda _: True)) is not None:
        found.append(item)
    return found


def test_one_line_is_first_come_first_served() -> None:
    queue: FairQueue[str] = FairQueue()
    for index, name in enumerate("abcd"):
        queue.push(name, USUAL_TURN, 1 + index * 7 % 5)
    queue.discard("b")
    queue.discard("b")
    assert len(queue) == 3 and drain(queue) == ["a", "c", "d"] and queue.pop(lambda _: True) is None


def test_a_higher_class_that_comes_later_goes_first_and_a_lower_one_still_gets_its_share() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(200):
        for name, turn in (("low", LOW), ("normal", USUAL_TURN), ("high", HIGH)):
            queue.push(f"{name}-{index}", turn, 5)
    first = drain(queue, 210)
    counts = Counter(item.partition("-")[0] for item in first)
    assert first[0] == "high-0" and dict(counts) == {"high": 160, "normal": 40, "low": 10}
    assert [item for item in first if item.startswith("low")] == [f"low-{index}" for index in range(10)]


def test_a_lone_high_request_passes_a_crowd() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(50):
        queue.push(f"normal-{index}", USUAL_TURN, 3)
    assert drain(queue, 7)[-1] == "normal-6"
    queue.push("high", HIGH, 8)
    assert queue.pop(lambda _: True) == "high"


def test_a_lone_low_request_waits_for_its_weight_of_a_stream_above_it_and_no_longer() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("high-0", HIGH, 4)
    queue.push("low", LOW, 4)
    passed = 0
    while (item := queue.pop(lambda _: True)) != "low":
        passed += 1
        assert item is not None
        queue.push(f"high-{passed}", HIGH, 4)
    assert 1 < passed <= 16


def test_a_tenant_with_a_crowd_does_not_delay_another() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(100):
        queue.push(f"crowd-{index}", Turn(tenant="crowd"), 2)
    assert drain(queue, 10)[-1] == "crowd-9"
    for index in range(5):
        queue.push(f"lone-{index}", Turn(tenant="lone"), 2)
    first = drain(queue, 10)
    assert Counter(item.partition("-")[0] for item in first) == {"crowd": 5, "lone": 5}


@pytest.mark.parametrize("others_cost", [1, 20])
def test_a_long_request_that_does_not_fit_is_passed_a_bounded_number_of_times(others_cost: int) -> None:
    """A stream of short ones that always fit: after MAX_PASSED of them everybody waits until there is room for the long one."""
    queue: FairQueue[str] = FairQueue()
    queue.push("long", USUAL_TURN, 1000)
    for index in range(10 * MAX_PASSED):
        queue.push(f"short-{index}", USUAL_TURN, others_cost)
    num_passed = 0
    while queue.pop(lambda item: item != "long") is not None:
        num_passed += 1
    assert num_passed == MAX_PASSED
    assert queue.pop(lambda _: True) == "long" and queue.pop(lambda _: True) == f"short-{MAX_PASSED}"


turns = st.builds(Turn, st.sampled_from(list(Priority)), st.sampled_from(["", "a", "b"]))


@given(st.lists(st.tuples(turns, st.integers(1, 40)), min_size=1, max_size=60), st.integers(40, 80), st.randoms())
def test_whoever_comes_is_let_in_whatever_keeps_coming(arrivals: list[tuple[Turn, int]], room: int, random: object) -> None:
    """A pool of `room` units, holders that leave at random, others pushed all the time: everybody of the first crowd gets in,
    within a bound on what the others were given meanwhile."""
    rng = random
    queue: FairQueue[int] = FairQueue()
    costs: dict[int, int] = {}
    held: dict[int, int] = {}
    first = set(range(len(arrivals)))
    for item, (turn, cost) in enumerate(arrivals):
        costs[item] = cost
        queue.push(item, turn, cost)
    others = 0
    while first:
        while (got := queue.pop(lambda item: costs[item] <= room - sum(held.values()))) is not None:
            held[got] = costs[got]
            first.discard(got)
        assert sum(held.values()) <= room and (held or not first)
        if held:
            del held[rng.choice(sorted(held))]  # type: ignore[attr-defined]
        others += 1
        item = 1000 + others
        costs[item] = 1 + others % 40
        queue.push(item, (HIGH, USUAL_TURN, Turn(Priority.HIGH, "a"))[others % 3], costs[item])
        assert others < 60 * len(arrivals) + 2000
    waiting = queue.waiting()
    assert sum(num for num, _ in waiting.values()) == len(queue)


@given(st.lists(st.tuples(turns, st.integers(1, 9)), max_size=40))
def test_all_that_was_pushed_comes_out_once_and_lines_keep_their_order(arrivals: list[tuple[Turn, int]]) -> None:
    queue: FairQueue[int] = FairQueue()
    for item, (turn, cost) in enumerate(arrivals):
        queue.push(item, turn, cost)
    out: list[int] = []
    while (got := queue.pop(lambda _: True)) is not None:
        out.append(got)
    assert sorted(out) == list(range(len(arrivals)))
    for turn in {turn for turn, _ in arrivals}:
        line = [item for item in out if arrivals[item][0] == turn]
        assert line == sorted(line)
