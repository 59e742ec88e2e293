"""What the router adds to an answer, and what a token costs it. Knows doors and the router's process; prints nothing.

Latency: a probe asks the worker and the router in turn, while the other streams run through the router at a human pace. CPU time
is the router process's own, by the kernel's nanosecond count, so that a busy machine disturbs it little.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from benchmarks.router.doors import Door
from shoal.simulator.cluster.outcome import Percentiles

WHOLE_TOKENS, WHOLE_RATE = 4, 100  # of an answer that is not streamed; tokens a second, as a worker's steps give them
FIRST_TOKENS = 4  # of a stream whose first token is timed


@dataclass(frozen=True, slots=True)
class Programme:
    """How much is measured at each number of streams."""

    streams: tuple[int, ...] = (1, 4, 16, 64)
    probes: int = 100
    rate: int = 20  # tokens a second of a paced stream
    paced_tokens: int = 60  # of each paced stream
    fast_tokens: int = 512  # of each stream whose tokens come at once


@dataclass(frozen=True, slots=True)
class Cost:
    """One door at one number of streams. Milliseconds are what the router adds; microseconds are the router's CPU time."""

    door: str
    streams: int
    direct_ms: float  # median first token of the worker without a router: what one call costs here
    first_p50_ms: float
    first_p95_ms: float
    whole_p50_ms: float
    whole_p95_ms: float
    us_per_request: float  # of one token
    paced_us_per_token: float
    fast_us_per_token: float
    fast_tokens_per_s: float  # all streams, by the wall clock: worker and client need cores, too

    @property
    def tokens_per_core_s(self) -> float:
        """Tokens a second at which one router would fill one core."""
        return 1e6 / self.fast_us_per_token


def cpu_s(pid: int) -> float:
    """CPU seconds of another process's threads, living and dead (Linux: its CPU-time clock)."""
    return time.clock_gettime((~pid << 3) | 2)


async def measure(name: str, direct: Door, door: Door, pid: int, streams: int, programme: Programme) -> Cost:
    """All figures of one door. Raises what the calls raise."""
    first, whole, direct_ms = await _added(direct, door, streams, programme)
    began_s = cpu_s(pid)
    for _ in range(programme.probes):
        await asyncio.gather(*(door.stream(1) for _ in range(streams)))
    request_us = 1e6 * (cpu_s(pid) - began_s) / (programme.probes * streams)
    paced_us, _ = await _tokens(door, pid, streams, programme.paced_tokens, programme.rate)
    fast_us, per_s = await _tokens(door, pid, streams, programme.fast_tokens, 0)
    return Cost(name, streams, direct_ms, *_ms(first), *_ms(whole), request_us, paced_us, fast_us, per_s)


async def _added(direct: Door, door: Door, streams: int, programme: Programme) -> tuple[list[float], list[float], float]:
    """Seconds that the router adds to a first token and to a whole answer, by pairs of probes; ms of a first token without it."""
    first, whole, alone = [], [], []
    async with _beside(door, streams - 1, programme.rate):
        for turn in range(programme.probes + 5):
            # one right after the other, or the router alone would have rested: idle cores wake slowly
            direct_first_s, door_first_s = await direct.stream(FIRST_TOKENS), await door.stream(FIRST_TOKENS)
            direct_whole_s = await direct.whole(WHOLE_TOKENS, WHOLE_RATE)
            door_whole_s = await door.whole(WHOLE_TOKENS, WHOLE_RATE)
            if turn >= 5:  # the others warm up
                first.append(door_first_s - direct_first_s)
                whole.append(door_whole_s - direct_whole_s)
                alone.append(direct_first_s)
    return first, whole, _ms(alone)[0]


@contextlib.asynccontextmanager
async def _beside(door: Door, num_streams: int, rate: int) -> AsyncIterator[None]:
    """So many streams, one answer after the other, begun apart from each other."""

    async def go_on(index: int) -> None:
        await asyncio.sleep(index / max(1, num_streams) / rate)
        while True:
            await door.stream(10 * rate, rate)

    running = [asyncio.create_task(go_on(index)) for index in range(num_streams)]
    try:
        await asyncio.sleep(0.2 if running else 0.0)
        yield
    finally:
        for task in running:
            task.cancel()
        for result in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def _tokens(door: Door, pid: int, streams: int, num_tokens: int, rate: int) -> tuple[float, float]:
    """(The router's CPU µs per token, tokens a second) of so many streams at once."""
    began_s, begin = cpu_s(pid), time.perf_counter()
    await asyncio.gather(*(door.stream(num_tokens, rate) for _ in range(streams)))
    total = streams * num_tokens
    return 1e6 * (cpu_s(pid) - began_s) / total, total / (time.perf_counter() - begin)


def _ms(seconds: list[float]) -> tuple[float, float]:
    found = Percentiles.of(seconds)
    assert found.p50 is not None and found.p95 is not None
    return 1e3 * found.p50, 1e3 * found.p95
