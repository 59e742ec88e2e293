"""What the prefill worker gains by taking short prompts that wait into one step."""

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.bench import Bench
from benchmarks.engine_bench import EngineBench
from benchmarks.sections.in_process import decoder, engine_bench
from benchmarks.tables import Row, Table
from shoal.engine.decoder import Decoder
from shoal.engine.segment import RequestKv, prefill_segments

NAME = "short-prompts"
TITLE = "Short prompts in one step"
_COUNT, _LENGTHS = 8, (16, 64, 128)


def run(bench: Bench) -> list[Table]:
    options = bench.options
    own, rows = decoder(options.model, options.dtype), []
    for length in _LENGTHS:
        engine = engine_bench(options, _COUNT * length)
        requests = [engine.reserve("full", length)[1] for _ in range(_COUNT)]
        runs: dict[str, Callable[[], float]] = {
            "in one step": partial(_prefill, engine, own, requests, length),
            "one by one": partial(_one_by_one, engine, own, requests, length),
        }
        taken = engine.interleaved(runs, 4 * options.repeats)
        rows.append(Row(f"{_COUNT} × {length}", {name: tuple(ms) for name, ms in taken.items()}))
    bench.say(f"{TITLE}: done")
    note = "Prefill at full depth, the engine alone. A step takes as many waiting prompts as its token budget holds."
    return [Table(TITLE, "prompts × tokens", "ms", tuple(rows), base="in one step", note=note)]


def _prefill(engine: EngineBench, own: Decoder, requests: Sequence[RequestKv], num_tokens: int) -> float:
    """Seconds of one step of these prompts, arbitrary ids."""
    ids = list(range(7, 7 + num_tokens))
    begin = engine.clock()
    segments = [each for kv in requests for each in prefill_segments(kv, ids[:-1], range(num_tokens - 1))]
    own.forward(segments, engine.pool).run()
    return engine.clock() - begin


def _one_by_one(engine: EngineBench, own: Decoder, requests: Sequence[RequestKv], num_tokens: int) -> float:
    """Seconds of a step for each of them."""
    return sum(_prefill(engine, own, [each], num_tokens) for each in requests)
