"""Workers that die and pools that scale: nothing is lost, nothing is counted twice, the rule is placement's own."""

import io
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from click.testing import CliRunner

from shoal.cli.main import cli
from shoal.errors import InvalidConfig, NotFound
from shoal.placement.admission import WaitBounds
from shoal.placement.autoscale import AutoscalePolicy
from shoal.placement.disaggregate import DisaggregationRule
from shoal.simulator.cluster import autoscaler, decode_node
from shoal.simulator.cluster.simulate import simulate
from shoal.simulator.cluster.spec import AutoscaleSpec, ClusterSpec, Failure, FailureSpec, PoolSpec
from shoal.simulator.machine import Machine
from shoal.simulator.workload.distributions import Arrivals, Lengths, drawn
from shoal.simulator.workload.requests import SimRequest
from tests.unit.test_simulator_cluster import MACHINE, cluster, load

DEATHS = FailureSpec(mtbf_s=4.0, restart_s=1.0)


@pytest.mark.parametrize("text", ["full", "speed:24", "pop:22:late"])
@pytest.mark.parametrize("shape", [(2, 2), (0, 2)])
def test_every_request_ends_and_every_block_comes_back_whoever_dies(text: str, shape: tuple[int, int]) -> None:
    spec = cluster(text, prefill=shape[0], decode=shape[1], failures=DEATHS, max_retries=50)
    requests = list(load(rate=12, count=200))
    outcome = simulate(spec, iter(requests), seed=2)  # the simulation itself checks that all blocks are free at the end
    assert outcome.num_finished + outcome.num_refused == len(requests)
    assert outcome.num_deaths > 5 and outcome.num_resumed > 0
    assert set(outcome.refused) <= {"no worker is up"}
    assert asdict(simulate(spec, iter(requests), seed=2)) == asdict(outcome)
    calm = simulate(replace(spec, failures=None), iter(requests), seed=2)
    assert calm.num_deaths == calm.num_resumed == 0 and calm.num_finished == len(requests)
    assert calm.ttft_s.p99 is not None and outcome.ttft_s.p99 is not None and outcome.ttft_s.p99 > calm.ttft_s.p99


def test_a_request_goes_on_where_it_was_when_its_decode_worker_dies() -> None:
    request = SimRequest(0.0, 4000, 400)
    calm = simulate(cluster(decode=2), iter([request]))
    assert calm.tpot_s.p50 is not None and calm.ttft_s.p50 is not None
    middle = calm.ttft_s.p50 + 200 * calm.tpot_s.p50
    deaths = tuple(Failure(middle, f"decode-0-{index}") for index in range(2))
    for victim in deaths:
        outcome = simulate(cluster(decode=2, failures=FailureSpec((victim,))), iter([request]))
        assert outcome.num_finished == 1 and outcome.ttft_s == calm.ttft_s
        if not outcome.num_resumed:
            assert outcome.duration_s == calm.duration_s  # the other one died
            continue
        assert outcome.wire_bytes == 2 * calm.wire_bytes  # the prompt is prefilled and shipped again
        again = outcome.duration_s - calm.duration_s
        assert 0.9 * calm.ttft_s.p50 < again < 1.2 * calm.ttft_s.p50  # one more prefill and transfer, and no token sampled twice
        lost = simulate(cluster(decode=2, failures=FailureSpec((victim,)), max_retries=0), iter([request]))
        assert lost.refused == {"worker failed": 1}
        break
    else:
        raise AssertionError("neither death met the request")


def test_a_prefill_worker_that_dies_costs_its_prompts_only() -> None:
    requests = [SimRequest(0.0, 8000, 300), SimRequest(1.0, 8000, 5)]
    calm = simulate(cluster(), iter(requests))
    outcome = simulate(cluster(failures=FailureSpec((Failure(1.05, "prefill-0-0"),), restart_s=0.5)), iter(requests))
    assert outcome.refused == {"no worker is up": 1} and outcome.num_finished == 1
    assert outcome.duration_s == pytest.approx(calm.duration_s, rel=0.02)  # the other went on
    with pytest.raises(NotFound, match=r"no worker is called 'prefill-9'; workers: decode-0-0, prefill-0-0"):
        simulate(cluster(failures=FailureSpec((Failure(1.0, "prefill-9"),))), iter(requests))


def wave(count: int = 900) -> list[SimRequest]:
    return list(drawn(Arrivals(6.0, 1.0, 0.9, 150.0), Lengths(6000, 0.5, 20_000), Lengths(120, 0.5, 500), count, 4))


def scaled(spec: ClusterSpec, most: int = 6) -> ClusterSpec:
    policy = AutoscalePolicy(1, most, down_cooldown_s=20)
    return replace(spec, autoscale=AutoscaleSpec(policy, policy, interval_s=2, start_s=5))


def test_pools_follow_the_load_and_cost_less_than_the_peak() -> None:
    requests = wave()
    small, large = (simulate(cluster(prefill=n, decode=n), iter(requests)) for n in (1, 6))
    outcome = simulate(scaled(cluster()), iter(requests))
    assert outcome.num_finished == len(requests)
    sizes = [each.num_workers for each in outcome.resized if each.pool == "prefill"]
    assert max(sizes) > 1 and any(b < a for a, b in pairwise(sizes))
    assert all(1 <= each.num_workers <= 6 for each in outcome.resized)
    assert small.ttft_s.p95 is not None and outcome.ttft_s.p95 is not None and large.ttft_s.p95 is not None
    assert large.ttft_s.p95 <= outcome.ttft_s.p95 < 0.5 * small.ttft_s.p95
    assert small.usd_per_hour is not None and outcome.usd_per_hour is not None and large.usd_per_hour is not None
    assert small.usd_per_hour < outcome.usd_per_hour < 0.8 * large.usd_per_hour


@pytest.mark.parametrize("utilisation", [None, 0.7])
def test_a_pool_that_grows_keeps_the_workers_it_has(utilisation: float | None) -> None:
    spec = scaled(cluster())
    assert spec.autoscale is not None
    outcome = simulate(replace(spec, autoscale=replace(spec.autoscale, utilisation=utilisation)), iter(wave(300)))
    for pool in ("prefill", "decode"):
        sizes = [each.num_workers for each in outcome.resized if each.pool == pool]
        assert all(a != b for a, b in pairwise(sizes)), f"{pool} was ordered the size it should have had already: {sizes}"
    assert max(each.num_workers for each in outcome.resized) > 1 and outcome.gpu_hours > 0


def test_the_scaling_rule_is_placements_own(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = wave(200)
    honest = simulate(scaled(cluster()), iter(requests))
    real = autoscaler.scale
    with monkeypatch.context() as patched:
        patched.setattr(autoscaler, "scale", lambda p, d, n, now, state: replace(real(p, d, n, now, state), num_workers=n))
        still = simulate(scaled(cluster()), iter(requests))
    assert honest.resized and not still.resized


def test_deaths_while_pools_scale_lose_nothing() -> None:
    spec = replace(scaled(cluster("speed:24"), 4), failures=FailureSpec(mtbf_s=20, restart_s=3), max_retries=50)
    outcome = simulate(spec, iter(wave(300)))
    assert outcome.num_finished + outcome.num_refused == 300 and outcome.num_deaths > 0


def test_settings_that_make_no_sense_are_refused() -> None:
    for make in (
        lambda: FailureSpec(mtbf_s=0),
        lambda: FailureSpec(restart_s=0),
        lambda: Failure(-1, "decode-0-0"),
        lambda: AutoscaleSpec(interval_s=0),
        lambda: AutoscaleSpec(utilisation=1.5),
    ):
        with pytest.raises(InvalidConfig):
            make()


def test_the_command_takes_deaths_and_bounds() -> None:
    flags = ["simulate", "--model", "llama-3.1-8b", "--prefill", "2", "--decode", "2", "--rate", "5/s", "--requests", "60"]
    told = [
        "--fail",
        "2s:decode-0-0",
        "--restart",
        "3s",
        "--scale-prefill",
        "1-3",
        "--scale-decode",
        "1-2",
        "--scale-start",
        "1s",
    ]
    result = CliRunner().invoke(cli, [*flags, *told, "--scale-down-after", "5s"])
    assert result.exit_code == 0 and "1 workers died" in result.output and "resized" in result.output, result.output
    for wrong, words in (
        (["--fail", "2s"], "TIME:WORKER"),
        (["--scale-decode", "3"], "MIN-MAX"),
        (["--scale-decode", "3-1"], "3 and 1"),
    ):
        result = CliRunner().invoke(cli, [*flags, *wrong])
        assert result.exit_code == 2 and words in result.output


def test_decode_workers_run_short_prompts_themselves_by_placements_rule() -> None:
    requests = [SimRequest(float(index), 40 if index % 2 else 4000, 8) for index in range(8)]
    away = simulate(cluster(), iter(requests))
    local = simulate(cluster(disaggregation=DisaggregationRule(100)), iter(requests))
    only_long = simulate(cluster(), iter(requests[::2]))
    assert local.wire_bytes == only_long.wire_bytes < away.wire_bytes
    assert local.ttft_s.p50 is not None and away.ttft_s.p50 is not None
    short = simulate(cluster(disaggregation=DisaggregationRule(100)), iter(requests[1:2]))
    assert short.ttft_s.p50 is not None and short.exposed_s.p50 is None
    assert short.ttft_s.p50 < min(away.ttft_curve_s)  # no hand-off
    dead = FailureSpec((Failure(0.0, "prefill-0-0"),), restart_s=100)
    refused = simulate(cluster(failures=dead), iter(requests))
    fallback = simulate(cluster(failures=dead, local_fallback=True), iter(requests))
    assert refused.refused == {"no worker is up": 8} and fallback.num_finished == 8 and fallback.wire_bytes == 0


def test_who_would_wait_too_long_is_refused_at_once_by_placements_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list(drawn(Arrivals(60.0), Lengths(4000, 0.5, 20_000), Lengths(20, 0.5, 100), 400, 7))
    endless = simulate(cluster(), iter(requests))
    bounded = simulate(cluster(max_wait_s=1.0), iter(requests))
    assert endless.num_refused == 0 and endless.ttft_s.p99 is not None and endless.ttft_s.p99 > 5
    assert bounded.refused["would wait too long"] == bounded.num_refused > 100
    assert bounded.ttft_s.p99 is not None and bounded.ttft_s.p99 < 2 and bounded.goodput_per_s > endless.goodput_per_s
    monkeypatch.setattr(WaitBounds, "bound_s", property(lambda self: 2 * self.max_wait_s))
    assert bounded.num_refused > simulate(cluster(max_wait_s=1.0), iter(requests)).num_refused > 0


def test_pools_on_one_host_slow_each_other_down_while_both_compute() -> None:
    requests = [SimRequest(0.0, 100, 400), SimRequest(1.0, 16_000, 2)]
    free = simulate(cluster(), iter(requests))
    crowded = Machine(MACHINE.gpu, MACHINE.profile.changed(crowd_prefill=0.5, crowd_decode=0.5))
    pools = {"prefill": (PoolSpec(crowded, 1),), "decode": (PoolSpec(crowded, 1),)}
    lines = [io.StringIO(), io.StringIO()]
    free = simulate(cluster(), iter(requests), lines=lines[0])
    shared = simulate(replace(cluster(), **pools), iter(requests), lines=lines[1])  # type: ignore[arg-type]
    rows = [{row.split(",")[0]: row.split(",") for row in out.getvalue().splitlines()[1:]} for out in lines]
    prefill_s = [float(each["2"][8]) for each in rows]
    assert prefill_s[1] == pytest.approx(1.5 * prefill_s[0], rel=1e-6)  # the first request steps all the while
    longer_s = float(rows[1]["1"][12]) - float(rows[0]["1"][12])
    assert longer_s == pytest.approx(prefill_s[1] / 2, rel=0.1)  # in that time it made half the steps
    assert free.num_finished == shared.num_finished == 2


@pytest.mark.parametrize("text", ["full", "speed:24", "pop:22:late"])
@pytest.mark.parametrize("prefill", [1, 0])
def test_preemption_lets_more_in_and_loses_nothing(text: str, prefill: int) -> None:
    small = replace(MACHINE, profile=MACHINE.profile.changed(memory=0.22))  # 1.5 GB beside the weights
    requests = list(drawn(Arrivals(30.0), Lengths(600, 0.5, 4000), Lengths(200, 0.5, 900), 90, 5))
    spec = replace(cluster(text, prefill=prefill, reserve_tokens=2000), decode=(PoolSpec(small, 1),))
    whole = simulate(spec, iter(requests))
    gives_way = simulate(replace(spec, preemption=True), iter(requests))
    assert gives_way.num_finished == whole.num_finished == 90  # and the simulation has checked that every block is free
    assert gives_way.num_preempted > 0 == whole.num_preempted
    assert gives_way.duration_s < whole.duration_s  # blocks that nobody uses keep nobody out
    assert asdict(simulate(replace(spec, preemption=True), iter(requests))) == asdict(gives_way)
    roomy = replace(spec, decode=(PoolSpec(MACHINE, 1),))
    calm = simulate(roomy, iter(requests)), simulate(replace(roomy, preemption=True), iter(requests))
    assert calm[1].num_preempted == 0 and calm[1].ttft_s.p95 == pytest.approx(calm[0].ttft_s.p95, rel=0.05)


def test_who_gives_way_is_placements_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(MACHINE, profile=MACHINE.profile.changed(memory=0.22))
    requests = list(drawn(Arrivals(30.0), Lengths(600, 0.5, 4000), Lengths(200, 0.5, 900), 60, 5))
    spec = replace(cluster(preemption=True), decode=(PoolSpec(small, 1),))
    honest = simulate(spec, iter(requests))
    with monkeypatch.context() as patched:
        patched.setattr(decode_node, "choose_victim", lambda holders: sorted(holders, key=lambda each: each.seniority)[-2:][0])
        assert asdict(simulate(spec, iter(requests))) != asdict(honest)
