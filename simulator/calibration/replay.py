"""The same requests against a running deployment and in simulation: TTFT and TPOT beside each other. Knows both sides' clients.

Open loop: every request is sent at its own time, whatever became of the ones before.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.simulator.calibration.measure import Asks, Timeline, ask
from shoal.simulator.cluster.outcome import Outcome, Percentiles
from shoal.simulator.workload.requests import SimRequest
from shoal.visibility import Visibility

_PERCENTILES = (("p50", 0.5), ("p95", 0.95))
_TOLERANCE = 0.10


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What one replay took, by request in the trace's order. TPOT is None for answers of one token."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float | None, ...]
    lateness_s: float  # how far behind its time the latest request was sent
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """One percentile of one quantity: the median of the live runs, their spread, and the simulation's."""

    what: str
    live_ms: float
    live_spread: float  # (most − least) / median of the runs
    simulated_ms: float

    @property
    def error(self) -> float:
        return self.simulated_ms / self.live_ms - 1

    @property
    def tolerance(self) -> float:
        """10 %, or twice the run-to-run spread when that is larger."""
        return max(_TOLERANCE, 2 * self.live_spread)

    @property
    def is_met(self) -> bool:
        return abs(self.error) <= self.tolerance


async def replay(
    client: Asks, requests: Sequence[SimRequest], visibility: Visibility, vocab_size: int, seed: int, told: Callable[[int], None]
) -> LiveRun:
    """Send all requests at their times and wait for the last. Prompts are random token ids: no prefix is shared."""
    rng = random.Random(f"{seed}/replay")
    prompts = [[rng.randrange(vocab_size) for _ in range(request.num_prompt_tokens)] for request in requests]
    begin, num_done, lateness = time.perf_counter(), 0, 0.0

    async def one(request: SimRequest, prompt: list[int]) -> Timeline:
        nonlocal num_done, lateness
        await asyncio.sleep(max(0.0, begin + request.arrival_s - time.perf_counter()))
        lateness = max(lateness, time.perf_counter() - begin - request.arrival_s)
        timeline = await ask(client, prompt, request.num_output_tokens, visibility)
        num_done += 1
        told(num_done)
        return timeline

    timelines = await asyncio.gather(*(one(request, prompt) for request, prompt in zip(requests, prompts, strict=True)))
    ttft = tuple(timeline.first_s - timeline.begin_s for timeline in timelines)
    tpot = tuple(
        (timeline.last_s - timeline.first_s) / (timeline.moments[-1][1] - 1) if timeline.moments[-1][1] > 1 else None
        for timeline in timelines
    )
    sent = sum(timeline.completion.transfer.payload_bytes for timeline in timelines if timeline.completion is not None)
    return LiveRun(ttft, tpot, lateness, sent)


def verdicts(runs: Sequence[LiveRun], simulated: Outcome) -> list[Verdict]:
    """TTFT and TPOT at p50 and p95, live runs against the simulation."""
    found = []
    live_tpot = [[value for value in run.tpot_s if value is not None] for run in runs]
    sides = (("TTFT", [list(run.ttft_s) for run in runs], simulated.ttft_s), ("TPOT", live_tpot, simulated.tpot_s))
    for name, lives, ours in sides:
        for label, share in _PERCENTILES:
            values = [1e3 * (Percentiles.of(live).at(share) or 0.0) for live in lives]
            middle = median(values)
            spread = (max(values) - min(values)) / middle if middle else 0.0
            found.append(Verdict(f"{name} {label}", middle, spread, 1e3 * (ours.at(share) or 0.0)))
    return found
