"""`shoal plan`: the cheapest cluster for a workload and its targets. Translates flags and prints; computes nothing."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from shoal.cli.plan_search import PlanRow, Solved, advice_of, rejected, row_of, solve
from shoal.cli.plan_server import serve_pages
from shoal.cli.planning import DEFAULT_GPU, DEFAULT_LINK, PROFILE_HELP, reports_errors
from shoal.cli.workload import workload_options
from shoal.simulator.page.render import render
from shoal.simulator.planning.search import Watch
from shoal.simulator.tables import to_table

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
@click.option("--gpu", "gpu_names", multiple=True, help=f"Several are compared; default: {DEFAULT_GPU}, or the profile file's.")
@click.option("--tp", "tps", multiple=True, default=("1",), show_default=True, help="GPUs per worker; several are compared.")
@click.option("--mixed", is_flag=True, help="Also prefill and decode on different hardware.")
@click.option("--profile", "profile_name", help=PROFILE_HELP)
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change one number of the profile.")
@click.option("--weights", type=click.Choice(["bf16", "fp8", "int4", "fp32"]), default="bf16", show_default=True)
@click.option("--kv", type=click.Choice(["bf16", "fp8", "fp32"]), default="bf16", show_default=True)
@click.option("--catalogue", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Your own YAML.")
@click.option(
    "--link", "link_names", multiple=True, help=f"Several are compared; default: {DEFAULT_LINK}, or the profile file's."
)
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
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page: one file, no network needed.")
@click.option("--serve", is_flag=True, help="Serve the page on this machine, with a form; plans on request.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="Of --serve; 0: any free one.")
@click.option("--format", "output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@reports_errors
def plan(output: str, sensitivity: bool, html: Path | None, serve: bool, port: int, **flags: Any) -> None:
    """The cheapest cluster that meets TTFT and TPOT targets at a quantile, beside the colocated baseline.

    \b
    shoal plan --model llama-3.1-8b --rate 20/s --prompt 8k --output 300 --length-cv 1 --slo-ttft 800ms --slo-tpot 25ms
    shoal plan --model llama-3.1-8b --gpu h100,a100 --mixed --link 25gbe,100gbe --trace azure2023_conv.csv --limit 3000
    """
    if serve:
        serve_pages(flags, port)
        return
    with _status() as watch:
        solved = solve(flags, sensitivity=sensitivity, watch=watch)
    if html is not None:
        html.write_text(render(solved.page()), encoding="utf-8")
    result, rows = solved.result, [row_of(each) for each in solved.result.front]
    if output == "json":
        document = {
            "advice": advice_of(result),
            "quantile": solved.options.quantile,
            "best": asdict(row_of(solved.best)),
            "baseline": asdict(row_of(result.baseline)) if result.baseline else None,
            "front": [asdict(row) for row in rows],
            "sensitivity": [asdict(change) for change in solved.changed],
            "link_needs": [asdict(need) for need in solved.needs],
            "ruled_out": [rejected(rejection) for rejection in result.rejections],
            "num_simulated": result.num_simulated,
        }
        click.echo(json.dumps(document, indent=1))
        return
    _print(solved, rows)


def _print(solved: Solved, rows: list[PlanRow]) -> None:
    result, percent = solved.result, 100 * solved.options.quantile
    click.echo(advice_of(result))
    console = Console(width=200)
    console.print(to_table(rows, f"No other plan beats these in cost, TTFT and TPOT (p{percent:g})", _PLAN_HEADINGS))
    click.echo(f"TTFT and TPOT are each judged at p{percent:g}; SLO met counts the requests that meet both.")
    if result.baseline is not None and result.baseline not in result.front:
        console.print(to_table([row_of(result.baseline)], "Cheapest without a split", _PLAN_HEADINGS))
    if solved.changed:
        console.print(to_table(solved.changed, f"When something changes: {row_of(solved.studied).plan}", _CHANGE_HEADINGS))
    if solved.needs:
        title = f"Link per interface that each depth would need ({solved.needs[0].prompt_tokens:,} tokens, 70% busy, 10% of TTFT)"
        console.print(to_table(solved.needs, title, _NEED_HEADINGS))
    for rejection in result.rejections:
        click.echo(f"ruled out: {rejected(rejection)}")
    click.echo(f"{result.num_simulated} clusters simulated, {len(solved.demand.requests):,} requests each")


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
