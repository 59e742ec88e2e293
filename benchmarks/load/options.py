"""What `python -m benchmarks.load` was asked for: flags to settings, refused with words. Knows no service."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.load.asks import Fit
from shoal.cli.planning import split_list
from shoal.cli.workload import tell_notes
from shoal.errors import InvalidConfig
from shoal.simulator.cluster.spec import Slo
from shoal.simulator.units import parse_rate, parse_seconds, parse_tokens
from shoal.simulator.workload.distributions import Arrivals, Lengths, drawn
from shoal.simulator.workload.requests import SimRequest, in_order, limited, scaled
from shoal.simulator.workload.trace_files import TraceNotes, read_trace
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Options:
    """The workload and its measures."""

    visibilities: str | None  # None: by the model's depth
    num_callers: int | None  # None: an open loop
    requests: tuple[SimRequest, ...]
    duration_s: float | None  # of arrivals
    scale: float
    system_tokens: int
    turns: int
    seed: int
    rounds: int
    slo: Slo
    timeout_s: float
    workload: str  # in words

    @classmethod
    def of(cls, flags: dict[str, Any]) -> Self:
        """Raises InvalidConfig with words that say what to change."""
        callers, rate, path = flags["callers"], flags["rate"], flags["trace"]
        if callers is not None and rate is not None:
            raise InvalidConfig("--callers is a closed loop and --rate an open one: give one of them")
        if path is not None and rate is not None:
            raise InvalidConfig("a trace has its own arrivals: change their rate with --rate-scale instead of --rate")
        if path is None and (flags["rate_scale"] != 1.0 or flags["scale_lengths"] != 1.0):
            raise InvalidConfig("--rate-scale and --scale-lengths change a trace: give --trace, or drawn lengths and --rate")
        if path is not None and flags["turns"] != 1:
            raise InvalidConfig("--turns makes conversations of drawn requests; a trace shares what it says it shares")
        if flags["visibilities"] is not None:
            visibilities_of(flags["visibilities"], 1)
        for name in ("requests", "rounds") if callers is None else ("requests", "rounds", "callers"):
            if flags[name] < 1:
                raise InvalidConfig(f"--{name} must be at least 1")
        if callers is None and rate is None and path is None:
            callers = 4
        duration_s = parse_seconds(flags["duration"]) if flags["duration"] is not None else None
        slo = Slo(parse_seconds(flags["slo_ttft"]), parse_seconds(flags["slo_tpot"]))
        requests, words = _from_trace(flags, path, duration_s) if path is not None else _from_seed(flags, rate)
        if callers is None:
            requests = tuple(limited(requests, num_requests=None, duration_s=duration_s))
        if not requests:
            raise InvalidConfig("no request is left to send: raise --requests or --duration")
        loop = f"{callers} callers, each waits for its answer" if callers else f"arrivals over {requests[-1].arrival_s:.1f} s"
        return cls(
            visibilities=flags["visibilities"], num_callers=callers, requests=requests, duration_s=duration_s,
            scale=flags["scale_lengths"], system_tokens=flags["system_tokens"], turns=flags["turns"], seed=flags["seed"],
            rounds=flags["rounds"], slo=slo, timeout_s=parse_seconds(flags["timeout"]),
            workload=f"{words}; {loop}; seed {flags['seed']}",
        )  # fmt: skip

    def fit(self, context: int) -> Fit:
        """For a model with this context."""
        return Fit(context, self.scale, self.system_tokens, self.turns)


def _from_trace(flags: dict[str, Any], path: Path, duration_s: float | None) -> tuple[tuple[SimRequest, ...], str]:
    notes = TraceNotes()
    source = limited(
        scaled(in_order(read_trace(path, notes)), flags["rate_scale"]), num_requests=flags["requests"], duration_s=duration_s
    )
    requests = tuple(source)
    tell_notes(notes)
    words = f"the first {len(requests)} requests of {path.name} ({notes.format}), lengths × {flags['scale_lengths']:g}"
    return requests, f"{words}, rate × {flags['rate_scale']:g}"


def _from_seed(flags: dict[str, Any], rate: str | None) -> tuple[tuple[SimRequest, ...], str]:
    prompt, output = parse_tokens(flags["prompt"]), parse_tokens(flags["output"])
    cv, per_s = flags["length_cv"], parse_rate(rate) if rate is not None else 1.0
    lengths = (Lengths(prompt, cv), Lengths(output, cv))
    requests = tuple(drawn(Arrivals(per_s), *lengths, flags["requests"], flags["seed"]))
    shared = [f"{flags['system_tokens']} tokens before each"] * bool(flags["system_tokens"])
    shared += [f"conversations of {flags['turns']} turns"] * (flags["turns"] > 1)
    words = f"{len(requests)} requests of {prompt} prompt and {output} output tokens in the mean (CV {cv:g})"
    return requests, ", ".join([words, *shared, *([f"Poisson {per_s:g}/s"] if rate is not None else [])])


def visibilities_of(text: str | None, num_layers: int) -> tuple[str, ...]:
    """As given, or full depth beside `speed` and `pop` at SmolLM2's depths (22 and 20 of 30) in proportion."""
    if text is not None:
        found = tuple(split_list((text,)))
        if not found:
            raise InvalidConfig("--visibilities is empty; name some, as in full,speed:22,pop:20")
        for each in found:
            Visibility.parse(each)
        return found
    depths = (max(1, round(num_layers * share / 30)) for share in (22, 20))
    return ("full", *(f"{kind}:{depth}" for kind, depth in zip(("speed", "pop"), depths, strict=True)))
