"""Shoal's engine without a batcher: decoders, a pool, and the two things to time. Knows one process; prints nothing."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.engine.decoder import Decoder
from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import RequestKv, anchor_segment, decode_segment, prefill_segments
from shoal.placement.blocks import BlockPool
from shoal.placement.tables import KvLayout, RequestTables
from shoal.visibility import Visibility

BLOCK_SIZE = 16
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class EngineBench:
    """A pool and a clock; prompts are arbitrary ids."""

    pool: KvPool
    blocks: BlockPool
    clock: Callable[[], float] = time.perf_counter

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

    def interleaved(self, runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
        """All runs once to warm up, then `repeats` rounds of each in turn: milliseconds."""
        for run in runs.values():
            run()
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                taken[name].append(1e3 * run())
        return taken
