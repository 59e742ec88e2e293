"""From answers to figures: percentiles, rates, goodput, cache hits, errors. Knows no service."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from benchmarks.load.loops import Answer, Run
from shoal.simulator.cluster.outcome import Percentiles
from shoal.simulator.cluster.spec import Slo

_PREFILL_WORKER = "prefill_worker"


@dataclass(frozen=True, slots=True)
class Figures:
    """One visibility. Seconds; shares 0…1. Rates count answered requests from the first request to the last answer."""

    visibility: str
    num_requests: int
    statuses: dict[str, int]  # OK, and every error by gRPC's name
    seconds: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    itl_s: Percentiles  # between messages with tokens: the router gathers tokens for --flush-ms
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float  # answered within both targets
    goodput_share: float  # of all requests, refused ones included
    cached_share: float  # of the prompts' tokens, found on the decode worker
    uncomputed_share: float  # found on either worker
    transferred_share: float  # of answered requests: prefilled on a prefill worker
    mean_prompt_tokens: float
    mean_output_tokens: float
    latest_s: float  # the request that was sent furthest behind its time


def figures(visibility: str, runs: Sequence[Run], slo: Slo) -> Figures:
    """All runs of one visibility together."""
    answers = [answer for run in runs for answer in run.answers]
    served = [answer for answer in answers if answer.status == "OK"]
    seconds = sum(run.seconds for run in runs)
    prompt, output = sum(a.prompt_tokens for a in served), sum(a.output_tokens for a in served)
    good = sum(is_good(answer, slo) for answer in served)

    def share(count: Callable[[Answer], int]) -> float:
        return sum(map(count, served)) / prompt if prompt else 0.0

    return Figures(
        visibility=visibility,
        num_requests=len(answers),
        statuses=dict(Counter(answer.status for answer in answers).most_common()),
        seconds=seconds,
        ttft_s=Percentiles.of([a.ttft_s for a in served if a.ttft_s is not None]),
        tpot_s=Percentiles.of([a.tpot_s for a in served if a.tpot_s is not None]),
        itl_s=Percentiles.of(list(chain.from_iterable(a.gaps_s for a in served))),
        requests_per_s=len(served) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        goodput_per_s=good / seconds,
        goodput_share=good / max(1, len(answers)),
        cached_share=share(lambda a: a.cached_tokens),
        uncomputed_share=share(lambda a: a.uncomputed_tokens),
        transferred_share=sum(a.prefill_at == _PREFILL_WORKER for a in served) / max(1, len(served)),
        mean_prompt_tokens=prompt / max(1, len(served)),
        mean_output_tokens=output / max(1, len(served)),
        latest_s=max((a.late_s for a in answers), default=0.0),
    )


def is_good(answer: Answer, slo: Slo) -> bool:
    """Whether an answer came within both targets. One of a single token has no TPOT to miss."""
    if answer.status != "OK" or answer.ttft_s is None:
        return False
    return answer.ttft_s <= slo.ttft_s and (answer.tpot_s is None or answer.tpot_s <= slo.tpot_s)


def table(found: Sequence[Figures], slo: Slo) -> tuple[list[str], list[list[str]]]:
    """(Headings, rows): a column for each visibility."""
    rows = [
        ["requests answered", *(f"{each.statuses.get('OK', 0)} of {each.num_requests}" for each in found)],
        ["errors", *(_errors(each) for each in found)],
        ["prompt / output tokens, mean", *(f"{each.mean_prompt_tokens:.0f} / {each.mean_output_tokens:.0f}" for each in found)],
        ["TTFT p50 / p95 / p99, ms", *(_ms(each.ttft_s) for each in found)],
        ["TPOT p50 / p95 / p99, ms", *(_ms(each.tpot_s) for each in found)],
        ["ITL p50 / p95 / p99, ms", *(_ms(each.itl_s) for each in found)],
        ["requests/s", *(f"{each.requests_per_s:.2f}" for each in found)],
        ["output tokens/s", *(f"{each.output_tokens_per_s:.1f}" for each in found)],
        ["all tokens/s", *(f"{each.total_tokens_per_s:.0f}" for each in found)],
        [
            f"goodput: TTFT ≤ {1e3 * slo.ttft_s:g} ms, TPOT ≤ {1e3 * slo.tpot_s:g} ms",
            *(f"{each.goodput_per_s:.2f}/s, {100 * each.goodput_share:.0f}%" for each in found),
        ],
        ["prompt tokens cached: decode / either", *(_cached(each) for each in found)],
        ["prefilled on the prefill worker", *(f"{100 * each.transferred_share:.0f}%" for each in found)],
    ]
    if any(each.latest_s for each in found):
        rows.append(["sent late by at most, ms", *(f"{1e3 * each.latest_s:.0f}" for each in found)])
    return ["", *(each.visibility for each in found)], rows


def _ms(values: Percentiles) -> str:
    shown = (
        "–" if value is None else f"{1e3 * value:,.{0 if value >= 0.1 else 1}f}" for value in (values.p50, values.p95, values.p99)
    )
    return " / ".join(shown)


def _errors(each: Figures) -> str:
    return ", ".join(f"{count} {status}" for status, count in each.statuses.items() if status != "OK") or "none"


def _cached(each: Figures) -> str:
    return f"{100 * each.cached_share:.0f}% / {100 * each.uncomputed_share:.0f}%"
