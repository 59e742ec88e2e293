"""What a simulation found: percentiles, goodput, how full each resource was, cost. Knows finished jobs; runs nothing."""

import csv
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

from shoal.simulator.cluster.job import Job
from shoal.simulator.cluster.spec import Slo

PERCENTILES = (0.5, 0.9, 0.95, 0.99)
_COLUMNS = (
    "request",
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "decode_worker",
    "prefill_worker",
    "queueing_s",
    "prefill_s",
    "exposed_transfer_s",
    "ttft_s",
    "tpot_s",
    "finish_s",
    "wire_bytes",
    "refused",
)


@dataclass(slots=True)
class RequestLog:
    """Four numbers per finished request, and with `lines` a CSV line as each one ends."""

    slo: Slo
    lines: TextIO | None = None
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    tpot_s: "array[float]" = field(default_factory=lambda: array("d"))
    queueing_s: "array[float]" = field(default_factory=lambda: array("d"))
    exposed_s: "array[float]" = field(default_factory=lambda: array("d"))
    refused: Counter[str] = field(default_factory=Counter)
    num_within_slo: int = 0
    num_late: int = 0  # TTFT over its target
    num_slow: int = 0  # TPOT over its target
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    wire_bytes: float = 0.0
    last_finish_s: float = 0.0
    num_retries: int = 0
    num_preempted: int = 0  # times that a request which was served gave way
    num_resumed: int = 0  # served, and had been on a worker that died

    def __post_init__(self) -> None:
        if self.lines is not None:
            csv.writer(self.lines, lineterminator="\n").writerow(_COLUMNS)

    def ended(self, job: Job, refusal: str) -> None:
        """Account a job; `refusal` is "" when it was served."""
        self.num_retries += job.num_retries
        if refusal:
            self.refused[refusal] += 1
            self._write(job, None, None, None, None, refusal)
            return
        assert job.first_token_s is not None and job.finish_s is not None
        ttft = job.first_token_s - job.arrival_s
        tpot = (job.finish_s - job.first_token_s) / (job.num_output_tokens - 1) if job.num_output_tokens > 1 else None
        started = job.prefill_start_s if job.prefill_start_s is not None else job.reserved_s
        queueing = (started or job.arrival_s) - job.arrival_s
        exposed = 0.0
        if job.delivered_s is not None and job.prefill_end_s is not None:
            exposed = job.delivered_s - job.prefill_end_s
            self.exposed_s.append(exposed)
        self.num_resumed += job.attempt > job.num_preempted
        self.num_preempted += job.num_preempted
        self.ttft_s.append(ttft)
        self.queueing_s.append(queueing)
        if tpot is not None:
            self.tpot_s.append(tpot)
        self.num_late += ttft > self.slo.ttft_s
        self.num_slow += tpot is not None and tpot > self.slo.tpot_s
        self.num_within_slo += ttft <= self.slo.ttft_s and (tpot is None or tpot <= self.slo.tpot_s)
        self.num_prompt_tokens += job.num_prompt_tokens
        self.num_output_tokens += job.num_output_tokens
        self.num_cached_tokens += max(job.num_cached_tokens, job.num_decode_cached)
        self.wire_bytes += job.wire_bytes
        self.last_finish_s = max(self.last_finish_s, job.finish_s)
        self._write(job, queueing, exposed, ttft, tpot, "")

    @property
    def num_finished(self) -> int:
        return len(self.ttft_s)

    @property
    def num_ended(self) -> int:
        return len(self.ttft_s) + self.refused.total()

    def _write(
        self, job: Job, queueing: float | None, exposed: float | None, ttft: float | None, tpot: float | None, refusal: str
    ) -> None:
        if self.lines is None:
            return
        prefill_s = None
        if job.prefill_start_s is not None and job.prefill_end_s is not None:
            prefill_s = job.prefill_end_s - job.prefill_start_s
        seconds = (queueing, prefill_s, exposed, ttft, tpot, job.finish_s)
        cells = ["" if value is None else f"{value:.6f}" for value in seconds]
        workers = [job.decode.name if job.decode else "", job.prefill.name if job.prefill else ""]
        counts = [job.num_prompt_tokens, job.num_output_tokens, max(job.num_cached_tokens, job.num_decode_cached)]
        row = [job.index, f"{job.arrival_s:.6f}", *counts, *workers, *cells, round(job.wire_bytes), refusal]
        csv.writer(self.lines, lineterminator="\n").writerow(row)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """p50, p90, p95 and p99 of a quantity, with its mean; None where nothing was counted."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """Nearest rank."""
        if not values:
            return cls(None, None, None, None, None)
        ordered = sorted(values)
        ranks = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in PERCENTILES]
        return cls(sum(ordered) / len(ordered), *ranks)

    def at(self, quantile: float) -> float | None:
        """One of the four."""
        return dict(zip(PERCENTILES, (self.p50, self.p90, self.p95, self.p99), strict=True))[quantile]


def curve(values: Sequence[float], num_points: int = 41) -> tuple[float, ...]:
    """Values at evenly spaced shares from the least to the greatest; () without values."""
    if not values:
        return ()
    ordered = sorted(values)
    return tuple(ordered[round(index * (len(ordered) - 1) / (num_points - 1))] for index in range(num_points))


@dataclass(frozen=True, slots=True)
class Resource:
    """How full something was, 0…1, over the whole simulation. `what` says what is counted."""

    name: str
    what: str
    mean: float
    peak: float | None = None


@dataclass(frozen=True, slots=True)
class Resized:
    """A pool has another size from now on."""

    at_s: float
    pool: str
    num_workers: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result. Times in seconds; gaps (ITL) are kept to 1 %."""

    num_finished: int
    num_refused: int
    refused: dict[str, int]
    num_retries: int
    duration_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    itl_s: Percentiles
    queueing_s: Percentiles
    exposed_s: Percentiles
    slo_attainment: float  # of all requests, refused ones included
    goodput_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    wire_bytes: float
    cached_share: float
    resources: tuple[Resource, ...]
    bottleneck: str
    num_gpus: int
    usd_per_hour: float | None
    usd_per_million_output: float | None
    usd_per_million_tokens: float | None
    num_events: int
    ttft_curve_s: tuple[float, ...]  # at 0, 2.5, 5 … 100 % of the finished requests
    tpot_curve_s: tuple[float, ...]
    gave_up: bool  # ended early: figures are of what had finished by then
    num_deaths: int = 0  # of workers
    num_preempted: int = 0  # times that a request gave its blocks up for others
    num_resumed: int = 0  # requests that finished on another worker than the one that died
    resized: tuple[Resized, ...] = ()  # by autoscaling
    gpu_hours: float = 0.0  # of all workers, while they were there
