"""`shoal simulate`: one cluster over one workload. Translates flags and prints; computes nothing."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.cli.dynamics import autoscale_of, dynamics_options, failures_of
from shoal.cli.planning import DEFAULT_LINK, catalogues, link_of, machine_of, model_of, model_options, reports_errors
from shoal.cli.workload import tell_notes, workload_of, workload_options
from shoal.errors import InvalidConfig
from shoal.placement.disaggregate import DisaggregationRule
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.cluster.report import RESOURCE_HEADINGS, TIME_HEADINGS, resource_rows, summary_lines, time_rows
from shoal.simulator.cluster.simulate import Progress as Report
from shoal.simulator.cluster.simulate import simulate as run
from shoal.simulator.cluster.spec import ClusterSpec, PoolSpec, Slo
from shoal.simulator.tables import to_table
from shoal.simulator.units import parse_bandwidth, parse_seconds, parse_tokens
from shoal.simulator.workload.trace_files import TraceNotes
from shoal.visibility import Visibility


@click.command("simulate")
@model_options
@click.option("--prefill", "prefill_texts", multiple=True, help="Workers: 2, or 2xH100 or 2xH100:tp4; repeat for unequal ones.")
@click.option("--decode", "decode_texts", multiple=True, help="The same for decode.")
@click.option("--colocated", "colocated_texts", multiple=True, help="Instead of both: workers that prefill and decode.")
@click.option("--link", "link_name", help=f"Catalogue name or bandwidth; default: {DEFAULT_LINK}, or the profile file's.")
@click.option("--nics", type=int, help="Interfaces per worker; default: one per GPU.")
@click.option("--fabric", help="Bandwidth that all transfers share, such as 400Gb/s; default: not limited.")
@click.option("--visibility", "text", default="full", show_default=True, help="full, speed:K, pop:K, pop:K:late.")
@click.option("--chunk", default="2k", show_default=True, help="Token budget of one step.")
@click.option("--batch", type=int, default=256, show_default=True, help="Requests that may run on a worker.")
@click.option("--queue", type=int, default=4096, show_default=True, help="Requests that may wait for blocks on a worker.")
@click.option("--max-tokens", type=int, help="What clients reserve; default: what they will get.")
@click.option(
    "--prefix-cache",
    type=click.Choice(["none", "prefill", "decode", "both"]),
    default="none",
    show_default=True,
    help="Who keeps prefixes; needs a trace with hashes.",
)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a KV block.")
@click.option(
    "--preemption", is_flag=True, help="Decode reserves an answer's first block; the least senior gives way when short."
)
@click.option("--max-wait", help="Refuse at once who would wait longer for a start, as `shoal serve` does after 60s.")
@click.option(
    "--local-prefill", type=int, default=0, show_default=True, help="Decode runs shorter prompts itself; `shoal serve`: 128."
)
@click.option("--local-fallback", is_flag=True, help="And all of them while no prefill worker is up.")
@click.option("--slo-ttft", default="1s", show_default=True)
@click.option("--slo-tpot", default="50ms", show_default=True)
@dynamics_options
@workload_options
@click.option("--csv", "csv_path", type=click.Path(dir_okay=False, path_type=Path), help="One line per request.")
@click.option("--format", "output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@reports_errors
def simulate(csv_path: Path | None, output: str, **flags: Any) -> None:
    """Latency percentiles, goodput, utilisation and cost of a cluster under a workload.

    \b
    shoal simulate --model llama-3.1-8b --prefill 2 --decode 1 --visibility speed:24 --trace azure2023_conv.csv
    shoal simulate --model llama-3.1-8b --colocated 3 --rate 8/s --prompt 4k --output 300 --length-cv 1
    """
    names = catalogues(flags["catalogue"])
    spec, workload, notes = cluster_of(names, flags), workload_of(flags), TraceNotes()
    with ExitStack() as stack:
        lines = stack.enter_context(csv_path.open("w", newline="")) if csv_path else None
        report = stack.enter_context(progress_bar(workload.num_requests if workload.trace is None else None))
        outcome = run(spec, workload.requests(notes), seed=workload.seed, lines=lines, progress=report)
    tell_notes(notes)
    if not outcome.num_finished and not outcome.num_refused:
        raise InvalidConfig("the workload has no requests")
    if output == "json":
        click.echo(json.dumps({"cluster": summary_lines(spec, outcome)[0], "seed": workload.seed, **asdict(outcome)}, indent=1))
        return
    for line in summary_lines(spec, outcome):
        click.echo(line)
    console = Console(width=160)
    console.print(to_table(time_rows(outcome), "Times", TIME_HEADINGS))
    console.print(to_table(resource_rows(outcome), "How full", RESOURCE_HEADINGS))


def cluster_of(names: Catalogues, flags: dict[str, Any]) -> ClusterSpec:
    """The cluster that the flags describe. Raises InvalidConfig, NotFound or InvalidRequest with words."""
    model = model_of(names, flags["model_name"], flags["weights"], flags["kv"])
    colocated, prefill, decode = (flags[f"{pool}_texts"] for pool in ("colocated", "prefill", "decode"))
    if bool(colocated) == bool(prefill or decode) or bool(prefill) != bool(decode):
        raise InvalidConfig("give --prefill and --decode, or --colocated instead of both")
    visibility = Visibility.parse(flags["text"]).resolve(model.shape.num_layers)
    return ClusterSpec(
        model=model,
        visibility=visibility,
        decode=_pools(names, colocated or decode, flags),
        prefill=_pools(names, prefill, flags),
        link=link_of(names, flags["link_name"], flags["profile_name"]),
        num_nics=flags["nics"],
        fabric_bytes_per_s=parse_bandwidth(flags["fabric"]) if flags["fabric"] else None,
        block_size=flags["block_size"],
        prefill_cache=flags["prefix_cache"] in ("prefill", "both"),
        decode_cache=flags["prefix_cache"] in ("decode", "both"),
        reserve_tokens=flags["max_tokens"],
        slo=Slo(parse_seconds(flags["slo_ttft"]), parse_seconds(flags["slo_tpot"])),
        disaggregation=DisaggregationRule(flags["local_prefill"]),
        local_fallback=flags["local_fallback"],
        preemption=flags["preemption"],
        max_wait_s=parse_seconds(flags["max_wait"]) if flags["max_wait"] else None,
        failures=failures_of(flags),
        autoscale=autoscale_of(flags),
    )


def _pools(names: Catalogues, texts: Sequence[str], flags: dict[str, Any]) -> tuple[PoolSpec, ...]:
    pools = []
    for text in texts:
        count, _, hardware = text.partition("x")
        gpu, _, tp = hardware.partition(":tp")
        if not count.isdigit() or (tp and not tp.isdigit()):
            raise InvalidConfig(f"{text!r} is no pool; write a number of workers, or 2xH100, or 2xH100:tp4")
        machine = machine_of(names, gpu or flags["gpu_name"], int(tp or flags["tp"]), flags["profile_name"], flags["changes"])
        pools.append(PoolSpec(machine, int(count), parse_tokens(flags["chunk"]), flags["batch"], flags["queue"]))
    return tuple(pools)


@contextmanager
def progress_bar(total: int | None) -> Iterator[Report | None]:
    """A bar on stderr while it is a terminal; None otherwise."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)

        def report(num_ended: int, now: float) -> None:
            bar.update(task, completed=num_ended, description=f"requests, at {now:,.0f} s")

        yield report


if __name__ == "__main__":
    simulate()
