"""The router's own cost, over a worker that computes nothing."""

import uvloop

from benchmarks.bench import Bench
from benchmarks.router.measure import Cost, Programme
from benchmarks.router.run import DOORS
from benchmarks.router.run import run as run_router
from benchmarks.tables import Row, Table

NAME = "router"
TITLE = "The router's own cost"


def run(bench: Bench) -> list[Table]:
    programme = Programme(probes=60, fast_tokens=256)
    costs, idle = uvloop.run(run_router(bench.options.model, None, programme, DOORS, lambda what, num_done, total: None))
    bench.say(f"{TITLE}: done")
    added = "What the router adds to a stream's first token and to a whole answer of 4 tokens, beside streams of 20 tokens/s."
    spent = f"CPU time of the router's process; idle it takes {1e3 * idle:.1f} ms a second."
    return [
        Table(f"{TITLE}: latency", "door × streams", "ms", tuple(map(_latency, costs)), note=added, is_plotted=False),
        Table(f"{TITLE}: CPU time", "door × streams", "µs", tuple(map(_cpu, costs)), note=spent, is_plotted=False),
    ]


def _latency(cost: Cost) -> Row:
    columns = {
        "without a router": cost.direct_ms,
        "first token p50": cost.first_p50_ms,
        "p95": cost.first_p95_ms,
        "whole answer p50": cost.whole_p50_ms,
        "p95 ": cost.whole_p95_ms,
    }
    return Row(_label(cost), {name: (value,) for name, value in columns.items()})


def _cpu(cost: Cost) -> Row:
    columns = {
        "a request of one token": cost.us_per_request,
        "a token at 20/s a stream": cost.paced_us_per_token,
        "a token at full speed": cost.fast_us_per_token,
    }
    return Row(_label(cost), {name: (value,) for name, value in columns.items()})


def _label(cost: Cost) -> str:
    return f"{cost.door} × {cost.streams}"
