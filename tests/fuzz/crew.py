"""Spreads inputs over processes, each with its memory bounded. Knows every target; prints nothing but progress."""

import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing.sharedctypes import Synchronized

from tests.fuzz.engine import Tally, bound_memory, run_one, run_slice
from tests.fuzz.file_targets import TARGETS as FILES
from tests.fuzz.http_targets import TARGETS as HTTP
from tests.fuzz.image_targets import TARGETS as IMAGES
from tests.fuzz.router_targets import TARGETS as GRPC
from tests.fuzz.target import Target
from tests.fuzz.text_targets import TARGETS as TEXTS
from tests.fuzz.transfer_targets import TARGETS as TRANSFER

TARGETS: dict[str, Target] = {target.name: target for target in (*GRPC, *HTTP, *TEXTS, *TRANSFER, *FILES, *IMAGES)}
_SLICE = 5000
_done: "Synchronized[int] | None" = None


def run(targets: list[Target], num_inputs: int, seed: int, first: int, jobs: int) -> dict[str, Tally]:
    """All inputs, in slices over `jobs` processes."""
    tallies = {target.name: Tally() for target in targets}
    whole = sum(target.share for target in targets)
    slices = list(_slices([(target, num_inputs * target.share // whole) for target in targets], first))
    planned = sum(stop - start for _, start, stop in slices)
    context = multiprocessing.get_context("spawn")
    done: Synchronized[int] = context.Value("L", 0)
    with ProcessPoolExecutor(jobs, context, _begin, (done,)) as pool:
        waiting = {pool.submit(_run_named, target.name, seed, start, stop): target.name for target, start, stop in slices}
        _show(done, planned, waiting)
        for future in as_completed(waiting):
            tallies[waiting[future]].add(future.result())
    return tallies


def warm_up() -> None:
    """What is made once is made before memory is bounded and time is taken."""
    for target in TARGETS.values():
        run_one(target, b"", -1, Tally())


def _slices(counts: list[tuple[Target, int]], first: int) -> Iterator[tuple[Target, int, int]]:
    for target, count in counts:
        for start in range(first, first + count, _SLICE):
            yield target, start, min(start + _SLICE, first + count)


def _show(done: "Synchronized[int]", planned: int, waiting: "dict[Future[Tally], str]") -> None:
    began, is_terminal = time.monotonic(), sys.stderr.isatty()
    shown_s = 0.0
    while not all(future.done() for future in waiting):
        time.sleep(0.5)
        now = time.monotonic()
        if now - shown_s < (0.5 if is_terminal else 30):
            continue
        shown_s = now
        share = done.value / planned
        bar = "█" * int(share * 30) + "░" * (30 - int(share * 30))
        line = f"{bar} {done.value:>9,} of {planned:,} inputs · {done.value / (now - began):,.0f} a second"
        print(f"\r{line}" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def _begin(done: "Synchronized[int]") -> None:
    global _done
    _done = done
    warm_up()
    bound_memory()


def _run_named(name: str, seed: int, start: int, stop: int) -> Tally:
    told = 0

    def tell(count: int) -> None:
        nonlocal told
        if _done is not None:
            with _done.get_lock():
                _done.value += count - told
        told = count

    tally = run_slice(TARGETS[name], seed, start, stop, tell)
    tell(tally.num_inputs)
    return tally
