"""Split serving, each pool on one core of its own: what the handoff adds to TTFT, beside the same work in one worker.

`python -m benchmarks.split` prints Markdown tables; `--parts`, `--lengths` and `--visibilities` choose what is measured.
Both cores must be free: figures of a busy machine are figures of the other programs.
"""

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.exposed import ms, print_exposed, print_exposed_head
from benchmarks.pools import RunningWorker, Timed, ask, ask_beside, resolved, worker
from benchmarks.wire import print_rates
from shoal.config.transfer import TransferConfig, choose_backend
from shoal.config.worker import Pool
from shoal.model_files import open_model
from shoal.placement.arithmetic import wire_bytes
from shoal.types import DType
from shoal.visibility import Visibility

PARTS = ("wire", "exposed", "overlap", "threshold", "shared")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=[str(dtype) for dtype in DType])
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--lengths", default="512,2048,7900")
    parser.add_argument("--visibilities", default="full,speed:22,pop:20")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backends", default="gloo,shared-memory", help="of the handoff, for the part exposed")
    parser.add_argument("--cpus", default="0,1", help="of prefill and decode")
    args = parser.parse_args()
    bench = SplitBench(args)
    for part in args.parts.split(","):
        if part == "wire":
            bench.rate = print_rates(*bench.cpus)
        else:
            asyncio.run(getattr(bench, part)())


class SplitBench:
    """One section for each method."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model, self.dtype, self.repeats = args.model, DType(args.dtype), args.repeats
        self.lengths = [int(text) for text in args.lengths.split(",")]
        self.visibilities = args.visibilities.split(",")
        self.backends = args.backends.split(",")
        self.cpus = tuple(int(text) for text in args.cpus.split(","))
        self.shape = open_model(self.model).config.shape
        self.common: dict[str, Any] = {"dtype": self.dtype, "kv_memory_bytes": 512 << 20}
        self.seeds = itertools.count(1000)  # of prompts of which nothing is to be cached
        self.rate = 1.5e9  # of the handoff, bytes per second; `wire` measures it

    async def exposed(self) -> None:
        """TTFT split and in one worker on the prefill core, in turn, and where the difference goes."""
        for backend in self.backends:
            await self._exposed(backend)

    async def _exposed(self, backend: str) -> None:
        print_exposed_head(backend)

        async def measure(prefill: RunningWorker, decode: RunningWorker, alone: RunningWorker) -> None:
            for length in self.lengths:
                for text in self.visibilities:
                    split, local = await self._interleaved(
                        lambda p, v: ask_beside(decode, prefill, p, v, 1),
                        lambda p, v: ask_beside(alone, None, p, v, 1),
                        length,
                        text,
                    )
                    steps = await ask(decode, None, _prompt(length, 99), resolved(text, self.shape.num_layers), 24)
                    visibility = Visibility.parse(resolved(text, self.shape.num_layers))
                    num_bytes = wire_bytes(self.shape, self.dtype, visibility, length)
                    layers = visibility.depth(self.shape.num_layers) if text.startswith("speed") else self.shape.num_layers
                    print_exposed(text, length, split, local, steps, num_bytes / layers / self.rate * 1e3)

        await self._with_three(measure, backend)

    async def overlap(self) -> None:
        """Four prompts at once through one pair: the pool computes while the last one's KV still travels."""
        print(
            "\n### Overlap: four prompts at once (ms)\n\n"
            "| visibility | prompt | all four | four × one's compute | one's after |\n|---|---|---|---|---|"
        )

        async def measure(prefill: RunningWorker, decode: RunningWorker, alone: RunningWorker) -> None:
            for length in self.lengths[:2]:
                for text in self.visibilities[:2]:
                    visibility = resolved(text, self.shape.num_layers)
                    rows: list[tuple[float, float, float]] = []
                    for repeat in range(self.repeats + 1):
                        one = await ask(decode, prefill, _prompt(length, repeat), visibility, 1)
                        assert one.prefill is not None
                        begin = time.perf_counter()
                        await asyncio.gather(
                            *(ask(decode, prefill, _prompt(length, 100 + 4 * repeat + i), visibility, 1) for i in range(4))
                        )
                        elapsed = (time.perf_counter() - begin) * 1e3
                        rows.append((elapsed, 4 * one.prefill.compute_ms, one.prefill.after_compute_ms))
                    columns = zip(*rows[1:], strict=True)
                    print(f"| {text} | {length} | {' | '.join(ms(column) for column in columns)} |", flush=True)

        await self._with_three(measure)

    async def threshold(self) -> None:
        """Short prompts: over the prefill worker, or on the decode worker; idle, and beside four streams that decode."""
        print(
            "\n### Short prompts: TTFT over the prefill worker and on decode (ms)\n\n"
            "busy: beside four streams of 512 tokens that decode; pause: the longest between two tokens of a stream.\n\n"
            "| prompt | idle split | idle local | busy split | busy local | pause split | pause local |\n"
            "|---|---|---|---|---|---|---|"
        )

        async def measure(prefill: RunningWorker, decode: RunningWorker, alone: RunningWorker) -> None:
            visibility = resolved("full", self.shape.num_layers)
            for length in (16, 64, 256, 512):
                cells = []
                for background in (0, 4):
                    split, local, pauses = await self._beside(background, prefill, decode, visibility, length)
                    cells += [ms(split), ms(local)]
                cells += [ms(pause) for pause in pauses]
                print(f"| {length} | {' | '.join(cells)} |", flush=True)

        await self._with_three(measure)

    async def _beside(
        self, num_streams: int, prefill: RunningWorker, decode: RunningWorker, visibility: str, length: int
    ) -> tuple[list[float], list[float], tuple[list[float], list[float]]]:
        """TTFT of prompts split and local (ms), and the streams' longest pauses, with so many streams that decode meanwhile."""
        ttfts: tuple[list[float], list[float]] = ([], [])
        pauses: tuple[list[float], list[float]] = ([], [])
        for repeat in range(self.repeats + 1):
            for way, leg in enumerate((prefill, None)):
                begun = [asyncio.Event() for _ in range(num_streams)]
                streams = [
                    asyncio.ensure_future(ask(decode, None, _prompt(512, next(self.seeds)), visibility, 64, event))
                    for event in begun
                ]
                for event in begun:
                    await event.wait()
                asked = time.perf_counter()
                timed = await ask(decode, leg, _prompt(length, next(self.seeds)), visibility, 1)
                done = await asyncio.gather(*streams)
                if repeat:
                    ttfts[way].append(timed.ttft * 1e3)
                    pauses[way].extend(stream.longest_pause(asked) * 1e3 for stream in done)
        return *ttfts, pauses

    async def shared(self) -> None:
        """Two workers of one thread, free to use both cores, beside one worker of two threads."""
        print(
            "\n### Two cores shared: split (one thread each) beside colocated (two threads) (ms)\n\n"
            "| streams | prompt | TTFT split | TTFT colocated | TPOT split | TPOT colocated |\n|---|---|---|---|---|---|"
        )
        with tempfile.TemporaryDirectory() as name:
            common = {**self.common, "transfer": TransferConfig(backend=choose_backend(on_one_machine=True))}
            async with (
                worker(Path(name), Pool.PREFILL, self.model, self.visibilities, **common) as prefill,
                worker(Path(name), Pool.DECODE, self.model, self.visibilities, **common) as decode,
                worker(
                    Path(name),
                    Pool.DECODE,
                    self.model,
                    self.visibilities,
                    worker_id="one",
                    colocated=True,
                    num_threads=2,
                    **common,
                ) as one,
            ):
                visibility = resolved("full", self.shape.num_layers)
                for num_streams in (1, 4):
                    for length in self.lengths[:2]:
                        split: list[Timed] = []
                        whole: list[Timed] = []
                        for repeat in range(self.repeats + 1):
                            for found, first, second in ((split, decode, prefill), (whole, one, None)):
                                asks = (
                                    ask(first, second, _prompt(length, 10 * repeat + i), visibility, 24)
                                    for i in range(num_streams)
                                )
                                done = await asyncio.gather(*asks)
                                found += done if repeat else []
                        cells = [ms(t.ttft * 1e3 for t in way) for way in (split, whole)]
                        cells += [ms(t.tpot * 1e3 for t in way) for way in (split, whole)]
                        print(f"| {num_streams} | {length} | {' | '.join(cells)} |", flush=True)

    async def _interleaved(
        self,
        first: Callable[[list[int], str], Awaitable[Timed]],
        second: Callable[[list[int], str], Awaitable[Timed]],
        length: int,
        text: str,
    ) -> tuple[list[Timed], list[Timed]]:
        visibility = resolved(text, self.shape.num_layers)
        repeats = max(2, self.repeats // 2) if length > 4096 else self.repeats
        ways: tuple[list[Timed], list[Timed]] = ([], [])
        for repeat in range(-2, repeats):
            prompt = _prompt(length, 100 + repeat)
            for found, way in zip(ways, (first, second), strict=True):
                timed = await way(prompt, visibility)
                if repeat >= 0:  # the first two are a warm-up
                    found.append(timed)
        return ways

    async def _with_three(
        self, measure: Callable[[RunningWorker, RunningWorker, RunningWorker], Awaitable[None]], backend: str = ""
    ) -> None:
        """A prefill and a decode worker on a core each, and a worker that does both on the prefill core."""
        common = {**self.common, "transfer": TransferConfig(backend=backend or self.backends[0])}
        first, second = ({"cpus": (cpu,), **common} for cpu in self.cpus)
        with tempfile.TemporaryDirectory() as name:
            async with (
                worker(Path(name), Pool.PREFILL, self.model, self.visibilities, **first) as prefill,
                worker(Path(name), Pool.DECODE, self.model, self.visibilities, **second) as decode,
                worker(Path(name), Pool.DECODE, self.model, self.visibilities, worker_id="alone", **first) as alone,
            ):
                await measure(prefill, decode, alone)


def _prompt(length: int, seed: int) -> list[int]:
    """No prompt begins like one of another seed or length: nothing of it is cached."""
    return [(7 + length * 13 + seed * 131 + at * 17) % 40_000 for at in range(length)]


if __name__ == "__main__":
    main()
