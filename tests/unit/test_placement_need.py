"""What autoscaling predicts from: sizes by powers of two, a level and a trend, waits before workers, a pace from steps."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidConfig
from shoal.placement.autoscale import AutoscalePolicy, Because, PoolDemand, ScaleState, need, scale
from shoal.placement.forecast import Forecast
from shoal.placement.history import PoolHistory
from shoal.placement.need import DecodeReadings, PrefillReadings, Targets, decode_demand, largest_batch, prefill_demand
from shoal.placement.queueing import erlang_c, wait_s, workers_for_wait
from shoal.placement.service import MeasuredService
from shoal.placement.tally import NO_SIZES, SizeCounts, Sizes, Tally


def sizes(*values: int) -> Sizes:
    counts = SizeCounts()
    for value in values:
        counts.add(value)
    return Sizes(tuple(counts.by_size), counts.total)


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=50))
def test_sizes_keep_the_mean_and_every_share(values: list[int]) -> None:
    found = sizes(*values)
    assert found.num == len(values) and math.isclose(found.mean, sum(values) / len(values))
    assert math.isclose(sum(share for share, _ in found.parts()), 1)
    assert math.isclose(sum(share * size for share, size in found.parts()), found.mean)
    assert found.quantile(1.0) == max(size for _, size in found.parts())


def test_differences_of_tallies_add_up() -> None:
    tally, before = Tally(), Tally()
    seen = []
    for size in (0, 1, 900, 3, 70_000):
        tally.num_arrived += 1
        tally.prompts.add(size)
        tally.stepped(2, size, 0.5)
        seen.append(tally.since(before))
        before = tally.copy()
    total = Tally()
    for each in seen:
        total = total.plus(each)
    assert total == tally and [each.prompts.total for each in seen] == [0, 1, 900, 3, 70_000]


def test_a_history_fades_and_what_came_in_an_unknown_time_tells_no_rate() -> None:
    history, done = PoolHistory(), Tally(num_arrived=100)
    done.prompts.add(1000)
    history.saw(done, 0.0, tells_rate=False)
    assert history.forecast.now_per_s == 0 and history.prompts.mean == 1000
    later = Tally(num_arrived=10)
    later.prompts.add(10)
    history.saw(later, 300.0)  # the half-life of sizes
    assert history.prompts.num == pytest.approx(1.5) and history.forecast.now_per_s > 0


def test_a_ramp_is_continued_and_noise_and_falls_are_not() -> None:
    ramp, still, fall = Forecast(), Forecast(), Forecast()
    rng = random.Random(1)
    for second in range(5, 1200, 5):
        ramp.saw(5 * (2 + 0.01 * second), 5)
        fall.saw(5 * (20 - 0.01 * second), 5)
        still.saw(sum(rng.random() < 0.02 for _ in range(500)), 5)  # 2 a second, nearly Poisson
    assert ramp.per_s(60) == pytest.approx(2 + 0.01 * 1260, rel=0.03) and ramp.now_per_s < ramp.per_s(60)
    assert still.per_s(60) == pytest.approx(2, rel=0.3)
    assert fall.per_s(60) == fall.now_per_s
    assert Forecast().per_s(60) == 0


def test_waits_are_those_of_the_textbook() -> None:
    assert erlang_c(1, 0.6) == pytest.approx(0.6)  # M/M/1: P(wait) = ρ
    assert erlang_c(3, 2.0) == pytest.approx(0.4444, abs=1e-4)  # M/M/3 at a = 2: 4/9
    # M/M/1 at ρ = 0.8, E[S] = 1: the 95 % quantile of the wait is ln(0.8/0.05)/(1 − 0.8)
    assert wait_s(1, 0.8, 1.0, 1.0, 0.95) == pytest.approx(math.log(16) / 0.2)
    assert wait_s(1, 0.8, 1.0, 0.0, 0.95) == pytest.approx(math.log(16) / 0.4)  # M/D/1: half of it
    assert wait_s(2, 2.0, 1.0, 1.0, 0.95) == math.inf and wait_s(1, 0.0, 1.0, 1.0, 0.95) == 0


def test_the_approximation_holds_against_a_simulated_queue() -> None:
    rng, num_workers, rate, service_s = random.Random(3), 3, 2.4, 1.0
    free_at, now, waits = [0.0] * num_workers, 0.0, []
    for _ in range(60_000):
        now += rng.expovariate(rate)
        begin = max(now, min(free_at))
        waits.append(begin - now)
        free_at[free_at.index(min(free_at))] = begin + rng.expovariate(1 / service_s)
    simulated = sorted(waits)[int(0.95 * len(waits))]
    assert wait_s(num_workers, rate, service_s, 1.0, 0.95) == pytest.approx(simulated, rel=0.15)


@given(st.floats(0.01, 50), st.floats(0.01, 5), st.floats(0.01, 10), st.floats(0.5, 0.99))
def test_the_fewest_workers_for_a_wait_are_the_fewest(rate: float, mean_s: float, longest_s: float, quantile: float) -> None:
    services = [(0.5, 0.5 * mean_s), (0.5, 1.5 * mean_s)]
    num = workers_for_wait(rate, services, quantile, longest_s)
    assert wait_s(num, rate, mean_s, 0.25, quantile) <= longest_s + 1e-9
    assert num == 1 or num - 1 <= rate * mean_s or wait_s(num - 1, rate, mean_s, 0.25, quantile) > longest_s - 1e-9


def test_the_pace_is_learned_from_steps() -> None:
    service = MeasuredService()
    assert service.step_s(8) == service.prefill_s(100) == 0
    service.decoded(10, 20, 10 * 0.05)  # ten steps of two rows: nothing is known of other batches, a little growth is assumed
    assert service.step_s(2) == pytest.approx(0.05) and 0.05 < service.step_s(12) < 0.1
    rng = random.Random(5)
    for _ in range(200):
        rows = rng.choice((1, 4, 16, 30))
        service.decoded(5, 5 * rows, 5 * (0.04 + 0.001 * rows + rng.gauss(0, 0.001)))
    assert service.step_s(20) == pytest.approx(0.06, rel=0.05)
    service.prefilled(5000, 2.0)
    assert service.prefill_s(1000) == pytest.approx(0.4)


class Pace:
    """A prompt takes a millisecond a token, a step 20 ms and one for each row."""

    source, steps_hold_prompts = "test", False

    def prefill_s(self, num_tokens: float) -> float:
        return 0.001 * num_tokens

    def step_s(self, num_rows: int, pairs_per_row: float = 0.0) -> float:
        return 0.02 + 0.001 * num_rows + 1e-6 * pairs_per_row * num_rows


def test_prefill_needs_workers_for_work_and_for_the_wait() -> None:
    readings = PrefillReadings(arrivals_per_s=2.0, prompts=sizes(*[1000] * 50))
    relaxed = prefill_demand(readings, Pace(), Targets(ttft_s=60))
    assert relaxed.offered_per_s == pytest.approx(2.0) and relaxed.num_for_wait == 3
    hurried = prefill_demand(readings, Pace(), Targets(ttft_s=1.3))
    assert hurried.num_for_wait > 4
    hopeless = prefill_demand(readings, Pace(), Targets(ttft_s=0.5))  # the prompt alone takes longer: no number helps
    assert hopeless.num_for_wait == 1 and need(AutoscalePolicy(), hopeless).num_workers == 3
    backlog = prefill_demand(PrefillReadings(waiting_tokens=30_000, prompts=readings.prompts), Pace(), Targets())
    assert backlog.waiting == pytest.approx(30.0)


def test_decode_needs_workers_for_tokens_for_rows_and_for_blocks() -> None:
    readings = DecodeReadings(arrivals_per_s=4.0, answers=sizes(*[200] * 9), max_rows=64, num_rows=5.0)
    assert largest_batch(Pace(), 0.05, 64, 0.0) == 30 and largest_batch(Pace(), 0.01, 64, 0.0) == 1
    assert largest_batch(Pace(), 0.05, 64, 1000.0) == 15
    found = decode_demand(readings, Pace(), Targets(tpot_s=0.05))
    assert found.offered_per_s == pytest.approx(4 * 200 * 0.05 / 30) and found.room == pytest.approx(5 / 30)
    held = DecodeReadings(arrivals_per_s=4.0, mean_hold_s=10, blocks_per_request=50, blocks_per_worker=1000, max_rows=64)
    assert decode_demand(held, Pace(), Targets()).room == pytest.approx(2.0)
    crowded = DecodeReadings(full=1.0, num_waiting=32, max_rows=64, blocks_per_request=50, blocks_per_worker=1000)
    assert decode_demand(crowded, Pace(), Targets()).room == pytest.approx(1 + 32 * 0.05)  # who waits will hold blocks, too
    prompts = DecodeReadings(arrivals_per_s=1.0, answers=NO_SIZES, prompts=sizes(500, 500), max_rows=4)
    assert decode_demand(prompts, Pace(), Targets()).offered_per_s == pytest.approx(0.5)
    learned = MeasuredService()
    learned.decoded(10, 10, 0.5)  # what decode workers prefill themselves is in their steps already
    assert decode_demand(prompts, learned, Targets()).offered_per_s == 0


def test_a_decision_says_what_asked_and_what_held_it() -> None:
    policy = AutoscalePolicy(1, 4, down_cooldown_s=60, up_cooldown_s=10, hysteresis=0.1)

    def decide(
        work: float, num: int, now: float = 100.0, state: ScaleState | None = None, wait: int = 1
    ) -> tuple[int, tuple[str, ...]]:
        found = scale(policy, PoolDemand(work, 0, 1.0, num_for_wait=wait), num, 100.0, state or ScaleState())
        return found.num_workers, found.because

    assert decide(1.4, 1) == (2, (Because.WORK,))
    assert decide(0.1, 1, wait=3) == (3, (Because.WAIT,))
    assert decide(9.0, 1) == (4, (Because.WORK, Because.MAX))
    assert decide(1.4, 1, state=ScaleState(last_up_s=95.0)) == (1, (Because.WORK, Because.UP_COOLDOWN))
    assert decide(1.38, 3) == (3, (Because.WORK, Because.HYSTERESIS))  # two would do, with too little to spare
    assert decide(1.2, 3) == (3, (Because.WORK, Because.DOWN_COOLDOWN))
    assert decide(0.1, 3, state=ScaleState(lower_since_s=30.0)) == (2, ())
    assert decide(0.0, 1) == (1, ())


@pytest.mark.parametrize("values", [{"ttft_s": 0}, {"tpot_s": -1}, {"quantile": 1.0}])
def test_impossible_targets_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig):
        Targets(**values)
