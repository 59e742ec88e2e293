"""The autoscaling rule: within bounds always, up at once, down slowly, still when the load is still."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidConfig
from shoal.placement.autoscale import AutoscalePolicy, PoolDemand, ScaleState, need, scale

POLICY = AutoscalePolicy(min_workers=1, max_workers=8, up_cooldown_s=10, down_cooldown_s=60)


def demand(offered: float, waiting: float = 0.0, room: float = 0.0) -> PoolDemand:
    return PoolDemand(offered, waiting, 100.0, room)


def num_needed(asked: PoolDemand) -> int:
    return need(POLICY, asked).num_workers


def test_the_need_is_the_larger_of_work_and_room() -> None:
    assert num_needed(demand(140)) == 2  # 140 at 70 of each
    assert num_needed(demand(141)) == 3
    assert num_needed(demand(0, waiting=700)) == 2  # 700 within 5 s
    assert num_needed(demand(0, room=3.6)) == 5
    assert num_needed(demand(0)) == 1


def test_up_at_once_and_as_far_as_needed_then_not_again_before_the_cooldown() -> None:
    first = scale(POLICY, demand(300), 1, 100.0, ScaleState())
    assert first.num_workers == 5
    again = scale(POLICY, demand(500), 5, 105.0, first.state)
    assert (again.num_workers, again.num_needed) == (5, 8)
    assert scale(POLICY, demand(500), 5, 110.0, again.state).num_workers == 8


def test_down_one_at_a_time_and_only_when_the_need_stays_lower() -> None:
    state, num_workers, sizes = ScaleState(), 4, []
    for second in range(0, 300, 10):
        load = 300.0 if second == 50 else 60.0  # one busy moment begins the waiting anew
        decision = scale(POLICY, demand(load), num_workers, float(second), state)
        if second == 50:
            assert decision.num_workers == 5
            continue  # as if the moment had passed unseen by the pool, but not by the rule
        state, num_workers = decision.state, decision.num_workers
        sizes.append(num_workers)
    assert sizes == sorted(sizes, reverse=True) and set(sizes) == {4, 3, 2, 1}
    steps = [index for index, (a, b) in enumerate(pairwise(sizes)) if a != b]
    assert all(later - earlier >= 5 for earlier, later in pairwise(steps))


@given(
    st.floats(0, 1e4), st.floats(0, 1e5), st.floats(0, 12), st.integers(1, 12), st.floats(0, 1e4),
    st.floats(0, 1e4), st.one_of(st.none(), st.floats(0, 1e4)),
)  # fmt: skip
def test_within_bounds_or_on_the_way_there(
    offered: float, waiting: float, room: float, num_workers: int, now: float, last_up: float, lower: float | None
) -> None:
    state = ScaleState(last_up, lower)
    decision = scale(POLICY, demand(offered, waiting, room), num_workers, now, state)
    assert decision.num_workers >= 1
    if num_workers <= POLICY.max_workers:
        assert POLICY.min_workers <= decision.num_workers <= POLICY.max_workers
    else:
        assert decision.num_workers == num_workers - 1
    more = scale(POLICY, demand(offered * 2, waiting, room), num_workers, now, state)
    assert more.num_workers >= decision.num_workers  # more load never means fewer workers


def test_a_still_load_ends_at_a_still_size() -> None:
    state, num_workers = ScaleState(), 1
    for second in range(0, 1000, 5):
        busy = 250 / (num_workers * 100)
        decision = scale(POLICY, demand(250, room=num_workers * min(1.0, 0.7 * busy)), num_workers, float(second), state)
        state, num_workers = decision.state, decision.num_workers
        assert second < 20 or num_workers == 4


@pytest.mark.parametrize(
    "numbers", [{"min_workers": 0}, {"min_workers": 3, "max_workers": 2}, {"target_utilisation": 0}, {"drain_s": 0}]
)
def test_contradictions_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig):
        AutoscalePolicy(**numbers)  # type: ignore[arg-type]
