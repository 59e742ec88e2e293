"""What `shoal plan` and its page share: from flags to a search's result, and a plan as a line. Prints nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.cli.planning import catalogues, gpu_of, link_of, model_of, profile_of, split_list
from shoal.cli.workload import tell_notes, workload_of
from shoal.errors import InvalidConfig
from shoal.simulator.cluster.report import describe, describe_short
from shoal.simulator.cluster.spec import Slo
from shoal.simulator.machine import Machine
from shoal.simulator.page.document import document
from shoal.simulator.planning.candidates import Options
from shoal.simulator.planning.demand import Demand
from shoal.simulator.planning.search import Plan, Rejection, SearchResult, Watch, search
from shoal.simulator.planning.sensitivity import Change, LinkNeed, changes, link_needs
from shoal.simulator.transfer_table import default_visibilities
from shoal.simulator.units import parse_seconds, parse_tokens
from shoal.simulator.workload.trace_files import TraceNotes
from shoal.visibility import Visibility, VisibilityKind


@dataclass(frozen=True)
class Solved:
    """A search and what was studied after it. `studied` is the plan that `changed` is about."""

    options: Options
    demand: Demand
    result: SearchResult
    best: Plan
    studied: Plan
    changed: list[Change]
    needs: list[LinkNeed]

    def page(self) -> dict[str, Any]:
        """What the planning page draws."""
        return document(self.options, self.demand, self.result, advice_of(self.result), self.changed, self.needs)


def solve(flags: dict[str, Any], *, sensitivity: bool, watch: Watch | None) -> Solved:
    """Search as the flags say. Raises InvalidConfig, NotFound or InvalidRequest with words."""
    options, workload, notes = options_of(flags), workload_of(flags), TraceNotes()
    demand = Demand.of(list(workload.requests(notes)))
    tell_notes(notes)
    result = search(options, demand, seed=workload.seed, watch=watch)
    best = result.best
    assert best is not None
    split = result.best_split
    studied = split or best
    changed = list(changes(studied, demand, options.quantile, workload.seed)) if sensitivity else []
    needs = []
    if split is not None:
        num_layers, ports = options.model.shape.num_layers, min(split.num_prefill, split.num_decode)
        sweep = [visibility.resolve(num_layers) for visibility in default_visibilities(num_layers)]
        needs = link_needs(split.family, sweep, ports, demand, options.quantile)
    return Solved(options, demand, result, best, studied, changed, needs)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One plan as a line."""

    plan: str
    gpus: int
    usd_per_hour: float | None
    usd_per_million: float | None
    ttft_ms: float
    tpot_ms: float
    goodput_per_s: float
    slo_attainment: float
    fullest: str
    meets: bool
    shoal_runs_it: str


def options_of(flags: dict[str, Any]) -> Options:
    """The search space that the flags describe. Raises InvalidConfig, NotFound or InvalidRequest with words."""
    names = catalogues(flags["catalogue"])
    model = model_of(names, flags["model_name"], flags["weights"], flags["kv"])
    num_layers, machines = model.shape.num_layers, []
    for name in _or_default(flags["gpu_names"]):
        gpu = gpu_of(names, name, flags["profile_name"])
        for tp in split_list(flags["tps"]):
            if not tp.isdigit():
                raise InvalidConfig(f"--tp {tp!r} is not a number of GPUs")
            machines.append(Machine(gpu, profile_of(gpu, flags["profile_name"], flags["changes"]), int(tp)))
    texts = split_list(flags["texts"])
    if flags["max_gpus"] < 1:
        raise InvalidConfig(f"--max-gpus {flags['max_gpus']} makes no sense; use 1 or more")
    given = [Visibility.parse(text) for text in texts] if texts else _defaults(num_layers)
    return Options(
        model=model,
        machines=tuple(machines),
        visibilities=tuple(visibility.resolve(num_layers) for visibility in given),
        links=tuple(link_of(names, name, flags["profile_name"]) for name in _or_default(flags["link_names"])),
        batches=tuple(flags["batches"]),
        token_budgets=tuple(parse_tokens(text) for text in split_list(flags["chunk_texts"])),
        slo=Slo(parse_seconds(flags["slo_ttft"]), parse_seconds(flags["slo_tpot"])),
        quantile=float(flags["quantile"]),
        max_gpus=flags["max_gpus"],
        num_nics=flags["nics"],
        mixed_hardware=flags["mixed"],
    )


def _or_default(values: Sequence[str]) -> Sequence[str | None]:
    """What was named; [None], for the default, when nothing was."""
    return split_list(values) or [None]


def _defaults(num_layers: int) -> Sequence[Visibility]:
    wanted = max(1, num_layers * 3 // 4)
    return [v for v in default_visibilities(num_layers) if v.kind is not VisibilityKind.SPEED or v.prefill_layers == wanted]


def _best_split(result: SearchResult) -> Plan | None:
    able = [each for each in result.plans if each.meets and not each.family.is_colocated]
    return min(able, key=lambda each: each.cost, default=None)


def advice_of(result: SearchResult) -> str:
    """Whether to split, what is cheapest, and what of it Shoal can run."""
    best, baseline, runnable = result.best, result.baseline, result.best_runnable
    assert best is not None
    today = ""
    if best.not_runnable:
        today = "\nShoal cannot run that yet (" + best.not_runnable + "). "
        today += (
            f"Cheapest that it can: {row_of(runnable).plan}, {runnable.price}." if runnable else "It can run none of the plans."
        )
    return _verdict(result, best, baseline) + today


def _verdict(result: SearchResult, best: Plan, baseline: Plan | None) -> str:
    text = describe(best.family.spec(max(1, best.num_prefill), best.num_decode))
    if best.family.is_colocated:
        split = _best_split(result)
        words = f"; the cheapest split costs {split.price}" if split else "; no split meets the targets"
        return f"Do not split. Cheapest: {text}, {best.price}{words}."
    if baseline is None:
        return f"Split. Cheapest: {text}, {best.price}; no colocated cluster meets the targets."
    saved = 1 - best.cost / baseline.cost
    return f"Split. Cheapest: {text}, {best.price}, {100 * saved:.0f}% less than colocated at {baseline.price}."


def row_of(each: Plan) -> PlanRow:
    """A plan as a line."""
    outcome = each.outcome
    tuned = each.family.visibility.kind is VisibilityKind.SPEED
    runs = f"not yet: {each.not_runnable}" if each.not_runnable else "yes (tuned model)" if tuned else "yes"
    return PlanRow(
        plan=describe_short(each.family.spec(max(1, each.num_prefill), each.num_decode)),
        gpus=each.num_gpus,
        usd_per_hour=outcome.usd_per_hour,
        usd_per_million=outcome.usd_per_million_output,
        ttft_ms=1e3 * each.ttft_s,
        tpot_ms=1e3 * each.tpot_s,
        goodput_per_s=outcome.goodput_per_s,
        slo_attainment=outcome.slo_attainment,
        fullest=outcome.bottleneck,
        meets=each.meets,
        shoal_runs_it=runs,
    )


def rejected(rejection: Rejection) -> str:
    """A family that was not simulated, and why."""
    family, limit = rejection.family, rejection.bounds
    return f"{describe_short(family.spec(max(1, limit.num_prefill), limit.num_decode))}: {rejection.reason}"
