"""The search: bounds are bounds, the best plan is the cheapest that simulation accepts, impossible targets are told why."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner

from shoal.cli.main import cli
from shoal.errors import InvalidConfig
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.cluster.spec import Slo
from shoal.simulator.machine import Machine
from shoal.simulator.planning.bounds import bounds
from shoal.simulator.planning.candidates import Options, families, not_yet_runnable
from shoal.simulator.planning.demand import Demand
from shoal.simulator.planning.search import SearchResult, evaluate, search
from shoal.simulator.planning.sensitivity import changes, link_needs
from shoal.simulator.profiles import PROFILES
from shoal.simulator.workload.distributions import Arrivals, Lengths, drawn
from shoal.simulator.workload.requests import SimRequest
from shoal.visibility import Visibility

NAMES = Catalogues.shipped()
LLAMA = NAMES.model("llama-3.1-8b")
MACHINE = Machine(NAMES.gpu("h100"), PROFILES["kernels-h100"])


def resolved(*texts: str) -> tuple[Visibility, ...]:
    return tuple(Visibility.parse(text).resolve(32) for text in texts)


def options(**changes: object) -> Options:
    base = Options(
        LLAMA,
        (MACHINE,),
        resolved("full", "speed:24"),
        (NAMES.link("100gbe"),),
        slo=Slo(0.6, 0.02),
        quantile=0.9,
        max_gpus=16,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def demand(rate: float = 15.0, count: int = 150, prompt: int = 4000) -> Demand:
    return Demand.of(list(drawn(Arrivals(rate), Lengths(prompt, 0.8, 30_000), Lengths(60, 0.5, 500), count, 1)))


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(options(), demand())


def test_the_best_plan_is_the_cheapest_that_meets_the_targets(found: SearchResult) -> None:
    best = found.best
    assert best is not None and best.meets and best.ttft_s <= 0.6 and best.tpot_s <= 0.02
    assert all(plan.cost >= best.cost for plan in found.plans if plan.meets)
    kinds = {(plan.family.is_colocated, str(plan.family.visibility.policy)) for plan in found.plans}
    assert (True, "full") in kinds and (False, "full") in kinds and (False, "speed:24") in kinds


def test_taking_a_worker_away_from_the_best_plan_misses_the_targets(found: SearchResult) -> None:
    best = found.best
    assert best is not None
    for fewer in ((best.num_prefill - 1, best.num_decode), (best.num_prefill, best.num_decode - 1)):
        if fewer[1] >= 1 and (best.family.is_colocated or fewer[0] >= 1) and fewer[0] >= 0:
            assert not evaluate(best.family, *fewer, demand(), 0.9, 0).meets


def test_nothing_on_the_front_is_dominated(found: SearchResult) -> None:
    front = found.front
    assert front and all(plan.meets for plan in front)
    for plan in front:
        for other in found.plans:
            if other.meets and other.cost <= plan.cost and other.ttft_s <= plan.ttft_s:
                assert other.tpot_s >= plan.tpot_s or (other.cost, other.ttft_s) == (plan.cost, plan.ttft_s)


def test_bounds_are_below_what_simulation_gives() -> None:
    asked = demand()
    for family in families(options(slo=Slo(10.0, 1.0))):
        limit = bounds(family, asked, 0.9)
        plan = evaluate(family, 12, 12, asked, 0.9, 0)
        assert not limit.impossible
        assert limit.ttft_s <= plan.ttft_s * 1.001, family
        assert limit.tpot_s <= plan.tpot_s * 1.001 or math.isclose(limit.tpot_s, plan.tpot_s, rel_tol=0.03), family


def test_an_impossible_target_names_the_bound_and_the_gap() -> None:
    with pytest.raises(InvalidConfig, match=r"TTFT: a prompt of [\d,]+ tokens .* ms over the target of 20 ms"):
        search(options(slo=Slo(0.02, 0.02)), demand())
    with pytest.raises(InvalidConfig, match=r"TPOT: one request alone takes at least [\d.]+ ms .* over the target of 2 ms"):
        search(options(slo=Slo(1.0, 0.002)), demand())
    with pytest.raises(InvalidConfig, match="more than the 1 allowed"):
        search(options(max_gpus=1), demand(rate=200))


def test_a_slow_link_makes_it_say_do_not_split() -> None:
    slow = search(options(links=(NAMES.link("1Gb/s"),), visibilities=resolved("full")), demand(rate=3))
    assert slow.best is not None and slow.best.family.is_colocated


def test_what_shoal_cannot_run_is_marked() -> None:
    split = next(family for family in families(options()) if not family.is_colocated)
    assert not_yet_runnable(split) == ""
    assert "tensor parallel" in not_yet_runnable(replace(split, decode=Machine(MACHINE.gpu, MACHINE.profile, 2)))
    assert "quantised" in not_yet_runnable(replace(split, model=LLAMA.with_precision(kv_bytes=1)))
    assert "architecture" in not_yet_runnable(replace(split, model=NAMES.model("deepseek-v3")))
    assert not_yet_runnable(replace(split, prefill=None)) == ""  # shoal serve --colocated


def test_machines_too_small_for_the_model_are_left_out_or_refused() -> None:
    big = NAMES.model("llama-3.1-70b")
    machines = (MACHINE, Machine(MACHINE.gpu, MACHINE.profile, 4))
    left = list(families(options(model=big, machines=machines, visibilities=(Visibility().resolve(80),))))
    assert left and all(family.decode.tensor_parallel == 4 for family in left)
    with pytest.raises(InvalidConfig, match=r"fits none of the given workers: .*141\.1 GB"):
        list(families(options(model=big)))


def test_sensitivity_and_link_needs(found: SearchResult) -> None:
    split = next(plan for plan in found.plans if not plan.family.is_colocated and plan.meets)
    rows = {change.what.split(" (")[0]: change for change in changes(split, demand(), 0.9, 0)}
    assert rows["link × 0.1"].ttft_ms > rows["as planned"].ttft_ms
    assert rows["link × 2"].ttft_ms < 1.03 * rows["as planned"].ttft_ms  # other ties may fall otherwise
    assert rows["prompts × 2"].ttft_ms > rows["as planned"].ttft_ms > rows["prompts × 0.5"].ttft_ms
    needs = link_needs(split.family, resolved("full", "speed:24", "speed:16"), 1, demand(), 0.9)
    loads = [need.for_load_gbit_s for need in needs]
    assert loads == sorted(loads, reverse=True) and loads[1] == pytest.approx(0.75 * loads[0], rel=1e-3)
    tight = replace(split.family, slo=Slo(0.01, 0.02))  # a tenth of it is less than the constant hand-off
    assert link_needs(tight, resolved("full"), 1, demand(), 0.9)[0].gbit_s is None


def requests() -> Iterator[SimRequest]:
    yield SimRequest(0.0, 10, 5)


def test_a_demand_needs_requests_over_time() -> None:
    with pytest.raises(InvalidConfig, match="at least two requests"):
        Demand.of(list(requests()))
    asked = demand(rate=15.0, count=2000)
    assert asked.rate == pytest.approx(15, rel=0.1) and asked.mean_output == pytest.approx(60, rel=0.1)
    assert asked.prompt_quantile(0.5) < asked.prompt_quantile(0.99)


def test_the_command_gives_advice_as_text_and_json() -> None:
    flags = ["plan", "--model", "llama-3.1-8b", "--rate", "15/s", "--prompt", "4k", "--output", "60", "--requests", "100"]
    flags += ["--slo-ttft", "600ms", "--slo-tpot", "20ms", "--visibility", "full,speed:24"]
    result = CliRunner().invoke(cli, flags)
    assert result.exit_code == 0, result.output
    assert "Cheapest: Llama-3.1-8B" in result.output and "link × 0.5" in result.output, result.output
    assert "clusters simulated" in result.output
    result = CliRunner().invoke(cli, [*flags, "--no-sensitivity", "--format", "json"])
    document = json.loads(result.output)
    assert document["best"]["meets"] and document["front"] and document["sensitivity"] == []
    result = CliRunner().invoke(cli, [*flags, "--slo-ttft", "10ms"])
    assert result.exit_code == 2 and "over the target of 10 ms" in result.output
