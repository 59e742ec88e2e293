"""`python -m benchmarks.load`: the same load under each visibility, against a running service or a cluster of its own."""

import asyncio
import csv
import json
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.load.figures import figures, table
from benchmarks.load.loops import Answer, Run
from benchmarks.load.options import Options
from benchmarks.load.run import Own, run
from benchmarks.markdown import markdown
from shoal.cli.planning import reports_errors
from shoal.cli.progress_bar import progress_bar
from shoal.cli.server_options import Server, server_options
from shoal.model_files import DEFAULT_MODEL
from shoal.types import DType

_address = click.option("--address", "-a", metavar="HOST:PORT", help="A running router; default: a cluster started for this.")
_trace = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@partial(server_options, address=_address)
@click.option("--model", default=DEFAULT_MODEL, help="Of the cluster started for this.")
@click.option("--dtype", default="bfloat16", type=click.Choice([str(dtype) for dtype in DType]), help="Of that cluster.")
@click.option("--visibilities", metavar="LIST", help="Default: full, and speed and pop at 22 and 20 thirtieths of the layers.")
@click.option("--callers", type=int, help="Closed loop: so many callers, each waits for its answer (4, if nothing else is said).")
@click.option("--rate", help="Open loop: Poisson arrivals, as in 2/s.")
@click.option("--trace", type=_trace, help="Open loop by a trace's arrivals; with --callers, its lengths only.")
@click.option("--rate-scale", default=1.0, help="Of a trace: how many times as fast.")
@click.option("--scale-lengths", default=1.0, help="Of a trace: all lengths times this, then clipped to the model's context.")
@click.option("--requests", default=40, help="So many at most.")
@click.option("--duration", metavar="TIME", help="Send none after this, as in 60s.")
@click.option("--prompt", default="256", help="Prompt tokens in the mean, without a trace.")
@click.option("--output", default="32", help="Output tokens in the mean, without a trace.")
@click.option("--length-cv", default=0.5, help="Coefficient of variation of both; 0: always the mean.")
@click.option("--system-tokens", default=0, help="The same tokens before every prompt.")
@click.option("--turns", default=1, help="Requests of one conversation; each repeats the prompts before it.")
@click.option("--rounds", default=1, help="Repeat all visibilities in turn, each time with other tokens.")
@click.option("--seed", default=0)
@click.option("--slo-ttft", default="2s")
@click.option("--slo-tpot", default="100ms")
@click.option("--timeout", default="300s", help="Deadline of one request.")
@click.option("--csv", "csv_path", type=click.Path(dir_okay=False, path_type=Path), help="Write one line per request there.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
@reports_errors
def command(server: Server, **flags: Any) -> None:
    """Put one load on a service under each visibility, and tell latency, throughput, goodput, cache hits and errors.

    Prompts are random tokens of the seed, answers run to their length. A cluster of its own is one prefill and one decode
    worker, each on half of the cores, and a router with `shoal serve`'s rule for short prompts.
    """
    options, own = Options.of(flags), Own(flags["model"], flags["dtype"])
    with progress_bar() as told:
        runs, notes = asyncio.run(run(server, own, options, told))
    found = [figures(text, mine, options.slo) for text, mine in runs.items()]
    if flags["csv_path"] is not None:
        _write_csv(flags["csv_path"], runs)
    if flags["as_json"]:
        about = {"workload": options.workload, "notes": notes, "slo": asdict(options.slo)}
        click.echo(json.dumps({"about": about, "visibilities": [asdict(each) for each in found]}, indent=1))
        return
    click.echo("\n".join([options.workload, *notes, "", *markdown(*table(found, options.slo))]))


def _write_csv(path: Path, runs: dict[str, list[Run]]) -> None:
    """One line per request; times in seconds."""
    names = ["round", *(field.name for field in fields(Answer) if field.name != "gaps_s")]
    with path.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for mine in runs.values():
            for turn, run in enumerate(mine):
                writer.writerows({"round": turn} | _cells(answer) for answer in run.answers)


def _cells(answer: Answer) -> dict[str, object]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(answer).items()}


if __name__ == "__main__":
    command()
