"""Times the engine alone, phase by phase: back ends and visibilities interleaved in one process, medians and ratios.

`python -m benchmarks.engine_phases --threads 1 --clock cpu`. On a machine that others use, `--clock cpu` with one thread
measures what the work costs rather than how long it waited. Prints Markdown tables.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.engine.decoder import Decoder, HeldLayers
from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import RequestKv, anchor_segment, decode_segment, prefill_segments
from shoal.model_files import open_model
from shoal.placement.blocks import BlockPool
from shoal.placement.tables import KvLayout, RequestTables
from shoal.types import DType
from shoal.visibility import Visibility

BLOCK_SIZE = 16
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Bench:
    """A pool and decoders by name; prompts are arbitrary ids."""

    decoders: dict[str, Decoder]
    pool: KvPool
    blocks: BlockPool
    clock: Callable[[], float]
    repeats: int

    def reserve(self, text: str, num_tokens: int) -> tuple[RequestTables, RequestKv]:
        num_layers = self.pool.shape.num_layers
        layout = KvLayout.of(num_layers, Visibility.parse(text).resolve(num_layers), num_tokens)
        tables = RequestTables(self.blocks, BLOCK_SIZE, layout)
        tables.reserve(num_tokens + 1, layout.num_upper_slots(num_tokens + 1))
        return tables, RequestKv.of(tables)

    def first_token(self, decoder: Decoder, text: str, num_tokens: int) -> float:
        """Seconds from token ids to the first token's scores, one chunk, and the boundary token's step."""
        tables, kv = self.reserve(text, num_tokens)
        ids, split = list(range(5, 5 + num_tokens)), kv.layout.split.num_prefill_tokens
        begin = self.clock()
        prefill = prefill_segments(kv, ids[:split], range(split))
        forward = decoder.forward(prefill, self.pool).run()
        ahead = [anchor_segment(kv, states, prefill[index].positions) for index, states in forward.states.items()]
        decoder.forward([*ahead, decode_segment(kv, ids[split:], range(split, num_tokens))], self.pool).run().logits.argmax(-1)
        seconds = self.clock() - begin
        tables.release()
        return seconds

    def step(self, decoder: Decoder, requests: list[RequestKv], num_tokens: int) -> float:
        """Seconds of one decode step of all requests, without sampling."""
        begin = self.clock()
        segments = [decode_segment(kv, [7], range(num_tokens, num_tokens + 1)) for kv in requests]
        decoder.forward(segments, self.pool).run().logits.argmax(-1)
        return self.clock() - begin

    def interleaved(self, runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
        """All runs once to warm up, then `repeats` rounds of each in turn: milliseconds."""
        for run in runs.values():
            run()
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                taken[name].append(1e3 * run())
        return taken


def table(title: str, rows: dict[str, dict[str, list[float]]]) -> None:
    """One line per case: median (least–most) of each column in ms, and every column's ratio to the first."""
    names = list(next(iter(rows.values())))
    print(f"\n| {title} | " + " | ".join(names) + " | " + " | ".join(f"{name} / {names[0]}" for name in names[1:]) + " |")
    print("|---" * (2 * len(names)) + "|")
    for case, taken in rows.items():
        medians = {name: statistics.median(values) for name, values in taken.items()}
        cells = [f"{medians[name]:.1f} ({min(taken[name]):.1f}–{max(taken[name]):.1f})" for name in names]
        cells += [f"{medians[name] / medians[names[0]]:.2f}" for name in names[1:]]
        print(f"| {case} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=[str(dtype) for dtype in DType])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--backends", default="torch,native")
    parser.add_argument("--visibilities", default="full,speed:22,pop:20")
    parser.add_argument("--lengths", default="512,2048,4096,7900")
    parser.add_argument("--batches", default="1x512,1x4096,8x512,16x512", help="requests × tokens of context")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, dtype = open_model(options.model), DType(options.dtype)
    lengths = [int(length) for length in options.lengths.split(",") if length]
    batches = [tuple(int(part) for part in batch.split("x")) for batch in options.batches.split(",") if batch]
    shape, held = model.config.shape, HeldLayers.everything(model.config.shape.num_layers)
    names = options.backends.split(",")
    decoders = {name: Decoder.load(model, dtype=dtype, held=held, backend=name)[0] for name in names}
    most = max([length for length in lengths] + [count * tokens for count, tokens in batches]) + 64 * BLOCK_SIZE
    num_blocks = shape.num_layers * (most // BLOCK_SIZE)
    pool = KvPool(shape, num_blocks, BLOCK_SIZE, dtype)
    bench = Bench(decoders, pool, BlockPool(num_blocks), CLOCKS[options.clock], options.repeats)
    print(f"{options.model}, {dtype}, {options.threads} threads, {options.clock} ms: median (least–most) of {options.repeats}")
    rows = {
        str(length): bench.interleaved(
            {name: lambda d=own, n=length: bench.first_token(d, "full", n) for name, own in decoders.items()}, options.repeats
        )
        for length in lengths
    }
    if rows:
        table("first token of a prompt of", rows)
    rows = {}
    for count, tokens in batches:
        reserved = [bench.reserve("full", tokens) for _ in range(count)]
        requests = [kv for _, kv in reserved]
        runs = {name: lambda d=own, r=requests, n=tokens: bench.step(d, r, n) for name, own in decoders.items()}
        rows[f"{count} × {tokens}"] = bench.interleaved(runs, 4 * options.repeats)
        for tables, _ in reserved:
            tables.release()
    if rows:
        table("one step of requests × context", rows)
    best = decoders[names[-1]]
    visibilities = options.visibilities.split(",") if options.visibilities else []
    rows = {
        str(length): bench.interleaved(
            {text: lambda t=text, n=length: bench.first_token(best, t, n) for text in visibilities}, options.repeats
        )
        for length in lengths
        if visibilities
    }
    if rows:
        table(f"{names[-1]}, first token by visibility, prompt of", rows)


if __name__ == "__main__":
    main()
