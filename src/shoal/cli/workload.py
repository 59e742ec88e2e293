"""Options that say which requests are simulated, and what they mean. Knows flags; draws and reads nothing itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from shoal.errors import InvalidConfig
from shoal.simulator.units import parse_rate, parse_seconds, parse_tokens
from shoal.simulator.workload.distributions import Arrivals, Lengths, drawn
from shoal.simulator.workload.requests import SimRequest, limited, scaled
from shoal.simulator.workload.trace_files import TraceNotes, read_trace

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What the flags said. `requests` may be called again and gives the same requests."""

    trace: Path | None
    strict: bool
    load: float
    limit: int | None
    duration_s: float | None
    arrivals: Arrivals | None
    prompt: Lengths
    output: Lengths
    num_requests: int
    seed: int

    def requests(self, notes: TraceNotes) -> Iterator[SimRequest]:
        """From the trace or the distributions, scaled and limited."""
        if self.trace is not None:
            source = read_trace(self.trace, notes, strict=self.strict)
        else:
            assert self.arrivals is not None
            notes.format = "drawn"
            source = drawn(self.arrivals, self.prompt, self.output, self.num_requests, self.seed)
        return limited(scaled(source, self.load), num_requests=self.limit, duration_s=self.duration_s)


def workload_options(command: Command) -> Command:
    """--trace or --rate, and what goes with either. They arrive as one mapping in `workload_of`."""
    for option in reversed(
        (
            click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="CSV or JSONL."),
            click.option("--strict", is_flag=True, help="Stop at the first malformed row instead of skipping it."),
            click.option("--load", type=float, default=1.0, show_default=True, help="Replay so many times as fast."),
            click.option("--limit", type=int, help="At most so many requests."),
            click.option("--duration", help="At most so much time of the trace, such as 10min."),
            click.option("--rate", help="Instead of a trace: requests per second, such as 5/s."),
            click.option("--arrival-cv", type=float, default=1.0, show_default=True, help="CV of the gaps; 1 = Poisson."),
            click.option("--diurnal", type=float, default=0.0, show_default=True, help="Amplitude of the daily curve, 0…1."),
            click.option("--period", default="24h", show_default=True, help="Of the daily curve."),
            click.option("--prompt", default="1k", show_default=True, help="Mean prompt tokens (with --rate)."),
            click.option("--output", "answer", default="200", show_default=True, help="Mean output tokens (with --rate)."),
            click.option("--length-cv", type=float, default=0.0, show_default=True, help="CV of both lengths; 0 = fixed."),
            click.option("--requests", "num_requests", type=int, default=2000, show_default=True, help="Drawn with --rate."),
            click.option("--seed", type=int, default=0, show_default=True, help="Reruns with one seed are identical."),
        )
    ):
        command = option(command)
    return command


def workload_of(flags: dict[str, Any]) -> WorkloadOptions:
    """Check the flags of `workload_options`. Raises InvalidConfig."""
    trace, rate = flags["trace"], flags["rate"]
    if (trace is None) == (rate is None):
        raise InvalidConfig("give either --trace FILE or --rate REQUESTS/s")
    if not flags["load"] > 0:
        raise InvalidConfig(f"--load {flags['load']} makes no sense; it must be more than zero")
    if flags["limit"] is not None and flags["limit"] < 1:
        raise InvalidConfig(f"--limit {flags['limit']} makes no sense; use 1 or more")
    period = parse_seconds(flags["period"])
    arrivals = None if rate is None else Arrivals(parse_rate(rate), flags["arrival_cv"], flags["diurnal"], period)
    return WorkloadOptions(
        trace=trace,
        strict=flags["strict"],
        load=flags["load"],
        limit=flags["limit"],
        duration_s=parse_seconds(flags["duration"]) if flags["duration"] else None,
        arrivals=arrivals,
        prompt=Lengths(parse_tokens(flags["prompt"]), flags["length_cv"]),
        output=Lengths(parse_tokens(flags["answer"]), flags["length_cv"]),
        num_requests=flags["num_requests"],
        seed=flags["seed"],
    )


def tell_notes(notes: TraceNotes) -> None:
    """Say on stderr what reading the trace met."""
    if notes.num_malformed:
        lines = ", ".join(map(str, notes.malformed_lines))
        more = ", …" if notes.num_malformed > len(notes.malformed_lines) else ""
        click.echo(f"skipped {notes.num_malformed} malformed of {notes.num_rows} rows (lines {lines}{more})", err=True)
    if notes.num_failed_at_source:
        click.echo(f"left out {notes.num_failed_at_source} requests that failed when the trace was taken", err=True)
