"""`shoal plan`: the cheapest cluster for a workload and its targets. Translates flags and prints; computes nothing."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from shoal.cli.planning import catalogues, model_of, profile_of, reports_errors, split_list
from shoal.cli.workload import tell_notes, workload_of, workload_options
from shoal.errors import InvalidConfig
from shoal.simulator.cluster.report import describe, describe_short
from shoal.simulator.cluster.spec import Slo
from shoal.simulator.machine import Machine
from shoal.simulator.planning.candidates import Options
from shoal.simulator.planning.demand import Demand
from shoal.simulator.planning.search import Plan, Rejection, SearchResult, Watch, search
from shoal.simulator.planning.sensitivity import changes, link_needs
from shoal.simulator.tables import to_table
from shoal.simulator.transfer_table import default_visibilities
from shoal.simulator.units import parse_seconds, parse_tokens
from shoal.simulator.workload.trace_files import TraceNotes
from shoal.visibility import Visibility, VisibilityKind


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


_PLAN_HEADINGS = {
    "plan": "plan",
    "gpus": "GPUs",
    "usd_per_hour": "USD/h",
    "usd_per_million": "USD/M out",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "slo_attainment": "SLO met",
    "fullest": "fullest",
    "shoal_runs_it": "Shoal runs it",
}
_CHANGE_HEADINGS = {
    "what": "",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "slo_attainment": "SLO met",
    "meets": "meets targets",
    "fullest": "fullest",
}
_NEED_HEADINGS = {
    "visibility": "visibility",
    "wire_bytes": "bytes",
    "for_load_gbit_s": "for the load Gb/s",
    "for_latency_gbit_s": "for TTFT Gb/s",
    "gbit_s": "link Gb/s",
}


@click.command("plan")
@click.option("--model", "model_name", required=True, help="Catalogue name, or a Hugging Face config.json.")
@click.option("--gpu", "gpu_names", multiple=True, default=("h100",), show_default=True, help="Several are compared.")
@click.option("--tp", "tps", multiple=True, default=("1",), show_default=True, help="GPUs per worker; several are compared.")
@click.option("--mixed", is_flag=True, help="Also prefill and decode on different hardware.")
@click.option("--profile", "profile_name", help="Efficiencies: kernels-a100, kernels-h100, engine, ideal.")
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change one number of the profile.")
@click.option("--weights", type=click.Choice(["bf16", "fp8", "int4", "fp32"]), default="bf16", show_default=True)
@click.option("--kv", type=click.Choice(["bf16", "fp8", "fp32"]), default="bf16", show_default=True)
@click.option("--catalogue", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Your own YAML.")
@click.option("--link", "link_names", multiple=True, default=("100gbe",), show_default=True, help="Several are compared.")
@click.option("--nics", type=int, help="Interfaces per worker; default: one per GPU.")
@click.option("--visibility", "texts", multiple=True, help="Default: full, speed at 3/4 of the layers, pop and late pop at 2/3.")
@click.option("--batch", "batches", multiple=True, type=int, default=(256,), show_default=True)
@click.option("--chunk", "chunk_texts", multiple=True, default=("2k",), show_default=True)
@click.option("--slo-ttft", default="1s", show_default=True)
@click.option("--slo-tpot", default="50ms", show_default=True)
@click.option("--quantile", type=click.Choice(["0.5", "0.9", "0.95", "0.99"]), default="0.95", show_default=True)
@click.option("--max-gpus", type=int, default=64, show_default=True)
@click.option(
    "--sensitivity/--no-sensitivity", default=True, show_default=True, help="Other links and prompts for the best plan."
)
@workload_options
@click.option("--format", "output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@reports_errors
def plan(output: str, sensitivity: bool, **flags: Any) -> None:
    """The cheapest cluster that meets TTFT and TPOT targets at a quantile, beside the colocated baseline.

    \b
    shoal plan --model llama-3.1-8b --rate 20/s --prompt 8k --output 300 --length-cv 1 --slo-ttft 800ms --slo-tpot 25ms
    shoal plan --model llama-3.1-8b --gpu h100,a100 --mixed --link 25gbe,100gbe --trace azure2023_conv.csv --limit 3000
    """
    options, workload, notes = _options(flags), workload_of(flags), TraceNotes()
    demand = Demand.of(list(workload.requests(notes)))
    tell_notes(notes)
    with _status() as watch:
        result = search(options, demand, seed=workload.seed, watch=watch)
        best = result.best
        assert best is not None
        split = best if not best.family.is_colocated else _best_split(result)
        studied = result.best_runnable or best
        changed = list(changes(studied, demand, options.quantile, workload.seed)) if sensitivity else []
    needs = []
    if split is not None:
        sweep = [v.resolve(options.model.shape.num_layers) for v in default_visibilities(options.model.shape.num_layers)]
        needs = link_needs(split.family, sweep, min(split.num_prefill, split.num_decode), demand, options.quantile)
    rows = [_row(each) for each in result.front]
    if output == "json":
        document = {
            "advice": _advice(result),
            "quantile": options.quantile,
            "best": asdict(_row(best)),
            "baseline": asdict(_row(result.baseline)) if result.baseline else None,
            "front": [asdict(row) for row in rows],
            "sensitivity": [asdict(change) for change in changed],
            "link_needs": [asdict(need) for need in needs],
            "ruled_out": [_rejected(rejection) for rejection in result.rejections],
            "num_simulated": result.num_simulated,
        }
        click.echo(json.dumps(document, indent=1))
        return
    click.echo(_advice(result))
    console = Console(width=200)
    console.print(
        to_table(rows, f"No other plan beats these in cost, TTFT and TPOT (p{100 * options.quantile:g})", _PLAN_HEADINGS)
    )
    if result.baseline is not None and result.baseline not in result.front:
        console.print(to_table([_row(result.baseline)], "Cheapest without a split", _PLAN_HEADINGS))
    if changed:
        title = f"When something changes: {_row(studied).plan}"
        console.print(to_table(changed, title, _CHANGE_HEADINGS))
    if needs:
        title = f"Link per interface that each depth would need ({needs[0].prompt_tokens:,} tokens, 70% busy, 10% of TTFT)"
        console.print(to_table(needs, title, _NEED_HEADINGS))
    for rejection in result.rejections:
        click.echo(f"ruled out: {_rejected(rejection)}")
    click.echo(f"{result.num_simulated} clusters simulated, {len(demand.requests):,} requests each")


def _options(flags: dict[str, Any]) -> Options:
    names = catalogues(flags["catalogue"])
    model = model_of(names, flags["model_name"], flags["weights"], flags["kv"])
    num_layers, machines = model.shape.num_layers, []
    for name in split_list(flags["gpu_names"]):
        gpu = names.gpu(name)
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
        links=tuple(names.link(name) for name in split_list(flags["link_names"])),
        batches=tuple(flags["batches"]),
        token_budgets=tuple(parse_tokens(text) for text in split_list(flags["chunk_texts"])),
        slo=Slo(parse_seconds(flags["slo_ttft"]), parse_seconds(flags["slo_tpot"])),
        quantile=float(flags["quantile"]),
        max_gpus=flags["max_gpus"],
        num_nics=flags["nics"],
        mixed_hardware=flags["mixed"],
    )


def _defaults(num_layers: int) -> Sequence[Visibility]:
    wanted = max(1, num_layers * 3 // 4)
    return [v for v in default_visibilities(num_layers) if v.kind is not VisibilityKind.SPEED or v.prefill_layers == wanted]


def _best_split(result: SearchResult) -> Plan | None:
    able = [each for each in result.plans if each.meets and not each.family.is_colocated]
    return min(able, key=lambda each: each.cost, default=None)


def _advice(result: SearchResult) -> str:
    best, baseline, runnable = result.best, result.baseline, result.best_runnable
    assert best is not None
    today = ""
    if best.not_runnable:
        today = "\nShoal cannot run that yet (" + best.not_runnable + "). "
        today += (
            f"Cheapest that it can: {_row(runnable).plan}, {runnable.cost:.2f}." if runnable else "It can run none of the plans."
        )
    return _verdict(result, best, baseline) + today


def _verdict(result: SearchResult, best: Plan, baseline: Plan | None) -> str:
    text = describe(best.family.spec(max(1, best.num_prefill), best.num_decode))
    if best.family.is_colocated:
        split = _best_split(result)
        words = f"; the cheapest split costs {split.cost:.2f}" if split else "; no split meets the targets"
        return f"Do not split. Cheapest: {text}, {best.cost:.2f} per hour{words}."
    if baseline is None:
        return f"Split. Cheapest: {text}, {best.cost:.2f} per hour; no colocated cluster meets the targets."
    saved = 1 - best.cost / baseline.cost
    return f"Split. Cheapest: {text}, {best.cost:.2f} per hour, {100 * saved:.0f}% less than colocated at {baseline.cost:.2f}."


def _row(each: Plan) -> PlanRow:
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


def _rejected(rejection: Rejection) -> str:
    family, limit = rejection.family, rejection.bounds
    return f"{describe_short(family.spec(max(1, limit.num_prefill), limit.num_decode))}: {rejection.reason}"


@contextmanager
def _status() -> Iterator[Watch | None]:
    """A line on stderr that says what is being tried, while it is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with Console(stderr=True).status("planning") as status:
        yield lambda text: status.update(f"planning: {text}")


if __name__ == "__main__":
    plan()
