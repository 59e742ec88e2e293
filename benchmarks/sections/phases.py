"""Where the time of a first token and of a decode step goes, phase by phase, in one process."""

import statistics
from collections.abc import Callable
from functools import partial

from benchmarks.bench import Bench
from benchmarks.sections.in_process import decoder, engine_bench
from benchmarks.tables import Row, Table
from shoal.engine.kernels import KernelsUnavailable, kernels

NAME = "phases"
TITLE = "Where the time goes"
_BATCHES = ((1, 512), (1, 4096), (8, 512), (16, 512))
_NAMES = ("projections", "attention", "MLP and output", "all else")


def run(bench: Bench) -> list[Table]:
    try:
        library = kernels()
    except KernelsUnavailable as error:
        bench.say(f"no phases: {error}")
        return []
    options = bench.options
    own = decoder(options.model, options.dtype)

    def split(work: Callable[[], float], repeats: int) -> dict[str, tuple[float, ...]]:
        """Milliseconds of the median repetition."""
        work()
        taken = []
        for _ in range(repeats):
            before = library.phase_seconds()
            total = work()
            parts = [after - then for after, then in zip(library.phase_seconds(), before, strict=True)]
            taken.append((total, [*parts, total - sum(parts)]))
        median = statistics.median_low([total for total, _ in taken])
        parts = next(parts for total, parts in taken if total == median)
        return {name: (1e3 * seconds,) for name, seconds in zip(_NAMES, parts, strict=True)}

    prompts, steps = [], []
    for length in options.lengths:
        engine = engine_bench(options, length)
        prompts.append(Row(f"{length:,}", split(partial(engine.first_token, own, "full", length), options.repeats)))
    for count, length in _BATCHES:
        engine = engine_bench(options, count * (length + 16))
        requests = [engine.reserve("full", length)[1] for _ in range(count)]
        work = split(partial(engine.step, own, requests, length), 8 * options.repeats)
        steps.append(Row(f"{count} × {length:,}", work))
    note = "Wall time of the median repetition. All else: embedding, LM head, Python, sampling apart."
    return [
        Table(f"{TITLE}: first token", "prompt tokens", "ms", tuple(prompts), note=note, is_plotted=False),
        Table(f"{TITLE}: one decode step", "requests × context", "ms", tuple(steps), note=note, is_plotted=False),
    ]
