"""A closed loop on a small cluster, one half of the cores for each pool: full depth beside shallow prefill."""

import asyncio
from collections.abc import Callable

from benchmarks.bench import Bench
from benchmarks.load.figures import Figures, figures
from benchmarks.load.options import Options
from benchmarks.load.run import Own
from benchmarks.load.run import run as run_load
from benchmarks.tables import Row, Table
from shoal.simulator.cluster.spec import Slo
from shoal.simulator.workload.distributions import Arrivals, Lengths, drawn

NAME = "load"
TITLE = "Under load"
_PROMPT, _OUTPUT, _REQUESTS, _CALLERS = 512, 32, 24, 4  # tokens in the mean, CV 0.5; requests a round
_SLO = Slo(2.0, 0.1)
_MS: dict[str, Callable[[Figures], float | None]] = {
    "TTFT p50": lambda found: found.ttft_s.p50,
    "TTFT p95": lambda found: found.ttft_s.p95,
    "TPOT p50": lambda found: found.tpot_s.p50,
    "TPOT p95": lambda found: found.tpot_s.p95,
}
_RATES: dict[str, Callable[[Figures], float | None]] = {
    "output tokens": lambda found: found.output_tokens_per_s,
    "all tokens": lambda found: found.total_tokens_per_s,
    "requests within the targets": lambda found: found.goodput_per_s,
}


def run(bench: Bench) -> list[Table]:
    requests = tuple(drawn(Arrivals(1.0), Lengths(_PROMPT, 0.5), Lengths(_OUTPUT, 0.5), _REQUESTS, seed=0))
    options = Options(
        visibilities=None, num_callers=_CALLERS, requests=requests, duration_s=None, scale=1.0, system_tokens=0, turns=1, seed=0,
        rounds=bench.options.repeats, slo=_SLO, timeout_s=300.0, workload="",
    )  # fmt: skip
    own = Own(bench.options.model, bench.options.dtype)
    runs, notes = asyncio.run(run_load(None, own, options, lambda what, num_done, total: None))
    found = {text: [figures(text, [one], _SLO) for one in mine] for text, mine in runs.items()}
    bench.say(f"{TITLE}: done")
    note = (
        f"{_CALLERS} callers, a round {_REQUESTS} requests of {_PROMPT} prompt and {_OUTPUT} output tokens in the mean. Targets: "
        f"TTFT {_SLO.ttft_s:g} s, TPOT {1e3 * _SLO.tpot_s:g} ms. {'; '.join(notes)}."
    )
    times = [Row(label, _samples(found, of, 1e3)) for label, of in _MS.items()]
    rates = [Row(label, _samples(found, of)) for label, of in _RATES.items()]
    return [
        Table(f"{TITLE}: latency", "", "ms", tuple(times), base="full", note=note, is_plotted=False),
        Table(f"{TITLE}: throughput", "", "per second", tuple(rates), base="full", note=note, is_plotted=False),
    ]


def _samples(
    found: dict[str, list[Figures]], of: Callable[[Figures], float | None], factor: float = 1.0
) -> dict[str, tuple[float, ...]]:
    return {text: tuple(factor * (of(each) or 0.0) for each in rounds) for text, rounds in found.items()}
