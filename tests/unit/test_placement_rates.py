import pytest

from shoal.placement.rates import HoldTimes, WorkRate


def test_idle_time_does_not_count_and_old_steps_fade() -> None:
    rate = WorkRate()
    assert rate.per_s == 0
    rate.ran(100, 0.5)
    assert rate.per_s == pytest.approx(200)
    for _ in range(40):
        rate.ran(400, 1.0)
    assert rate.per_s == pytest.approx(400, rel=0.01)


def test_holders_that_stay_long_tell_before_any_has_ended() -> None:
    times = HoldTimes()
    assert times.mean_s(5.0, ()) == 0 and times.mean_s(5.0, (1.0, 3.0)) == 3.0
    for _ in range(60):
        times.ended(2.0)
    assert times.mean_s(5.0, (4.0,)) == pytest.approx(2.0)
