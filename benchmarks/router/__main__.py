"""`python -m benchmarks.router`: what the router adds to an answer and what a token costs it, as Markdown or JSON."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import uvloop

from benchmarks.markdown import markdown
from benchmarks.router.measure import Cost, Programme
from benchmarks.router.run import DOORS, run
from shoal.cli.planning import reports_errors, split_list
from shoal.cli.progress_bar import progress_bar
from shoal.errors import InvalidConfig

_HEADINGS = (
    "door", "streams", "first token without a router, p50 ms", "added p50", "p95", "whole answer, added p50", "p95",
    "CPU µs per request", "per token, paced", "at full speed", "tokens/s per core", "tokens/s measured",
)  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--streams", default="1,4,16,64", metavar="LIST", help="Streams at once.")
@click.option("--doors", default=",".join(DOORS), metavar="LIST", help="Of the router: grpc, http.")
@click.option("--probes", default=100, help="Requests whose latency is compared, at each number of streams.")
@click.option("--rate", default=20, help="Tokens a second of a stream at a human pace.")
@click.option("--tokens", default=512, help="Tokens of a stream at full speed.")
@click.option("--router-cpu", type=int, help="Hold the router to this core, worker and client to the others.")
@click.option("--model", default="smollm2-135m", help="Whose tokenizer the router uses.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
@reports_errors
def command(**flags: Any) -> None:
    """Measure the router alone.

    A decode worker that computes nothing runs in a process of its own; it is asked directly and through a router process. Added
    latency is the difference of two probes in turn, beside streams of --rate tokens a second.
    """
    programme, doors = _programme(flags)
    with progress_bar() as told:
        costs, idle = uvloop.run(run(flags["model"], flags["router_cpu"], programme, doors, told))
    if flags["as_json"]:
        rows = [asdict(cost) | {"tokens_per_core_s": cost.tokens_per_core_s} for cost in costs]
        click.echo(json.dumps({"idle_cpu_share": idle, "costs": rows}, indent=1))
    else:
        click.echo("\n".join(markdown(_HEADINGS, [_cells(cost) for cost in costs])))
        click.echo(f"\nidle, the router takes {1e3 * idle:.1f} ms of CPU time a second")


def _programme(flags: dict[str, Any]) -> tuple[Programme, tuple[str, ...]]:
    texts = split_list((flags["streams"],))
    if not texts or not all(text.isdigit() and 1 <= int(text) <= 1024 for text in texts):
        raise InvalidConfig(f"--streams {flags['streams']} should be numbers from 1 to 1024, as in 1,4,16")
    for name in ("probes", "rate", "tokens"):
        if flags[name] < 1:
            raise InvalidConfig(f"--{name} must be at least 1")
    doors = tuple(split_list((flags["doors"],)))
    if not doors or not set(doors) <= set(DOORS):
        raise InvalidConfig(f"--doors {flags['doors']} should be some of {', '.join(DOORS)}")
    cpus = os.sched_getaffinity(0)
    if flags["router_cpu"] is not None and not (flags["router_cpu"] in cpus and len(cpus) > 1):
        raise InvalidConfig(f"--router-cpu {flags['router_cpu']} needs two cores, and to be one of {sorted(cpus)}")
    programme = Programme(tuple(map(int, texts)), flags["probes"], flags["rate"], 3 * flags["rate"], flags["tokens"])
    return programme, doors


def _cells(cost: Cost) -> list[str]:
    latencies = (cost.direct_ms, cost.first_p50_ms, cost.first_p95_ms, cost.whole_p50_ms, cost.whole_p95_ms)
    counts = (
        cost.us_per_request,
        cost.paced_us_per_token,
        cost.fast_us_per_token,
        cost.tokens_per_core_s,
        cost.fast_tokens_per_s,
    )
    return [cost.door, str(cost.streams), *(f"{value:.2f}" for value in latencies), *(f"{value:,.0f}" for value in counts)]


if __name__ == "__main__":
    if not Path("tests/fakes").is_dir():
        sys.exit("run this in the root of a checkout: the null worker is built from its tests/fakes")
    command()
