"""The overload curve: what a small cluster of real processes does when 0.25 to 3 times of what it can serve is asked of it.

    python -m benchmarks.overload [--seconds 12] [--svg docs/overload.svg]

A random model, one prefill worker, one decode worker, one router, each a process. Capacity is measured first, by a closed loop
that keeps every place taken. Then each load is offered as an open loop: Poisson arrivals that do not wait for answers. Goodput is
what was answered with a first token within the bound: the router's `--max-wait-s`, and what a request takes alone.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.curve_svg import Panel, render
from benchmarks.pinned_cluster import pinned_cluster, workers
from shoal.client import AsyncClient, Retry, Sampling
from shoal.client.types import Completion
from shoal.errors import CapacityExceeded
from shoal.model_files import write_random_model

LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
PLACES = 4  # requests that a worker runs together: few, so that a queue forms soon
PROMPTS, ANSWERS = (32, 256), (40, 120)  # tokens, evenly spread


@dataclass(frozen=True, slots=True)
class Asked:
    """One request's outcome. `ttft_s` is None for one that was refused."""

    ttft_s: float | None
    seconds: float
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One load."""

    load: float
    offered_per_s: float
    asked: tuple[Asked, ...]
    seconds: float  # of arrivals

    @property
    def ttfts(self) -> list[float]:
        return sorted(one.ttft_s for one in self.asked if one.ttft_s is not None)

    @property
    def num_refused(self) -> int:
        return sum(one.ttft_s is None for one in self.asked)

    def goodput_per_s(self, bound_s: float) -> float:
        return sum(ttft <= bound_s for ttft in self.ttfts) / self.seconds


async def ask(client: AsyncClient, rng: random.Random) -> Asked:
    prompt = [rng.randrange(3, 500) for _ in range(rng.randint(*PROMPTS))]
    sampling = Sampling(max_tokens=rng.randint(*ANSWERS), ignore_eos=True)
    started, first = time.monotonic(), None
    try:
        async for event in client.generate(token_ids=prompt, sampling=sampling, timeout_s=120):
            if first is None and not isinstance(event, Completion):
                first = time.monotonic() - started
    except CapacityExceeded as error:
        return Asked(None, time.monotonic() - started, error.retry_after_s)
    return Asked(first, time.monotonic() - started)


async def capacity(client: AsyncClient, seconds: float) -> tuple[float, float]:
    """(Requests a second with every place taken, seconds to the first token of one that is alone)."""
    rng = random.Random(0)
    alone = [await ask(client, rng) for _ in range(6)]
    stop = time.monotonic() + seconds
    done = 0

    async def keep_busy() -> None:
        nonlocal done
        while time.monotonic() < stop:
            await ask(client, rng)
            done += time.monotonic() < stop

    await asyncio.gather(*(keep_busy() for _ in range(PLACES + 2)))
    return done / seconds, statistics.median(one.ttft_s or 0.0 for one in alone[1:])


async def offer(client: AsyncClient, load: float, per_s: float, seconds: float) -> Point:
    """Arrivals at this rate for so long; returns when the last answer has come."""
    rng = random.Random(round(load * 1000))
    started, running = time.monotonic(), []
    due = started
    while due < started + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        running.append(asyncio.create_task(ask(client, rng)))
        due += rng.expovariate(per_s)
    return Point(load, per_s, tuple(await asyncio.gather(*running)), seconds)


def table(points: Iterable[Point], bound_s: float) -> list[str]:
    """As Markdown. TTFT is that of requests which were let in."""
    lines = [
        "| load | offered /s | requests | let in | refused | TTFT p50 | p95 | longest | refusals told within | goodput /s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for point in points:
        ttfts, told = point.ttfts, [one.seconds for one in point.asked if one.ttft_s is None]
        lines.append(
            f"| {point.load:g}× | {point.offered_per_s:.1f} | {len(point.asked)} | {len(ttfts)} | {point.num_refused} "
            f"| {quantile(ttfts, 0.5):.2f} s | {quantile(ttfts, 0.95):.2f} s | {ttfts[-1]:.2f} s "
            f"| {f'{1e3 * max(told):.0f} ms' if told else '–'} | {point.goodput_per_s(bound_s):.1f} |"
        )
    return lines


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def picture(bounded: list[Point], unbounded: list[Point], bound_s: float, per_s: float) -> str:
    """Waits and goodput over the load, with and without the bound."""
    kinds = {"with the bound": bounded} | ({"without": unbounded} if unbounded else {})
    waits = {
        f"p{percent}, {name}": [(at.load, quantile(at.ttfts, percent / 100)) for at in points]
        for name, points in kinds.items()
        for percent in (50, 95)
    }
    good = {name: [(at.load, at.goodput_per_s(bound_s)) for at in points] for name, points in kinds.items()}
    x = "offered load, times the capacity"
    return render(
        [
            Panel("Time to first token of requests let in", x, "seconds", waits, (bound_s, "bound")),
            Panel("Answers within the bound", x, "a second", good, (per_s, "capacity")),
        ]
    )


async def measure(options: argparse.Namespace, max_wait_s: float, per_s: float | None) -> tuple[list[Point], float, float]:
    """(Points, capacity, TTFT alone) of a cluster with this bound; 0: none."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(folder, num_layers=6, hidden_size=128, intermediate_size=256, max_context=1024)
        prefill, decode = workers(str(model), "float32", ["speed:2"], max_running_requests=PLACES, kv_memory_bytes=64 << 20)
        cpus = os.sched_getaffinity(0)
        more = ("--max-wait-s", str(max_wait_s), "--local-prefill-tokens", "0")
        async with pinned_cluster(
            prefill, decode, prefill_cpus=cpus, decode_cpus=cpus, router_cpus=cpus, router_arguments=more
        ) as address, AsyncClient(address, retry=Retry(attempts=1)) as client:  # fmt: skip
            measured, alone_s = await capacity(client, max(5.0, options.seconds))
            per_s = per_s or measured
            points = []
            for load in options.loads:
                points.append(await offer(client, load, load * per_s, options.seconds))
                print(f"{load:g}× of {per_s:.1f}/s: {len(points[-1].asked)} asked, {points[-1].num_refused} refused", flush=True)
            return points, per_s, alone_s


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each load")
    parser.add_argument("--max-wait-s", type=float, default=2.0, help="the router's bound")
    parser.add_argument("--loads", type=lambda text: [float(part) for part in text.split(",")], default=list(LOADS))
    parser.add_argument("--unbounded", action="store_true", help="measure a router without a bound, too")
    parser.add_argument("--svg", type=Path, help="where to draw the curve")
    options = parser.parse_args()
    bounded, per_s, alone_s = asyncio.run(measure(options, options.max_wait_s, None))
    bound_s = options.max_wait_s + alone_s
    print(f"\ncapacity {per_s:.1f} requests/s; alone {alone_s * 1e3:.0f} ms; bound {bound_s:.2f} s\n")
    print("\n".join(table(bounded, bound_s)))
    unbounded: list[Point] = []
    if options.unbounded:
        unbounded, _, _ = asyncio.run(measure(options, 0.0, per_s))
        print("\nwithout a bound:\n")
        print("\n".join(table(unbounded, bound_s)))
    if options.svg is not None:
        options.svg.write_text(picture(bounded, unbounded, bound_s, per_s))


if __name__ == "__main__":
    main()
