"""What a short prompt costs where it is prefilled: CPU time of the engine's steps, one thread, without calls and transfer.

`python -m benchmarks.local_prefill` prints a Markdown table. Over a prefill worker a first token takes a pass over the prompt
there and a decode step; on the decode worker both are one step, but streams that decode there wait for it. CPU time depends
little on what else the machine does.
"""

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from shoal.engine.decoder import Decoder, HeldLayers
from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import RequestKv, Segment, decode_segment, local_prefill_segments, prefill_segments
from shoal.model_files import open_model
from shoal.placement.blocks import BlockPool
from shoal.placement.tables import KvLayout, RequestTables
from shoal.types import DType
from shoal.visibility import Visibility

LENGTHS: Final = (16, 32, 64, 128, 256, 512)
NUM_STREAMS: Final = 4
CONTEXT: Final = 512  # tokens of each stream
REPEATS: Final = 3


class Steps:
    """Steps of one decoder; every prompt is of arbitrary ids."""

    def __init__(self) -> None:
        model = open_model("smollm2-135m")
        self._num_layers = model.config.shape.num_layers
        torch.set_num_threads(1)
        self._decoder, _ = Decoder.load(model, dtype=DType.BFLOAT16, held=HeldLayers.everything(self._num_layers))
        num_blocks = self._num_layers * (NUM_STREAMS + 1) * (CONTEXT // 16 + 2)
        self._blocks, self._pool = BlockPool(num_blocks), KvPool(model.config.shape, num_blocks, 16, DType.BFLOAT16)
        self._streams = [decode_segment(self._reserve(CONTEXT), [9], range(CONTEXT - 1, CONTEXT)) for _ in range(NUM_STREAMS)]

    def _reserve(self, num_tokens: int) -> RequestKv:
        visibility = Visibility.parse("full").resolve(self._num_layers, 1)
        tables = RequestTables(self._blocks, 16, KvLayout.of(self._num_layers, visibility, num_tokens))
        tables.reserve(num_tokens, 0)
        self._tables = tables
        return RequestKv.of(tables)

    def measure(self, num_tokens: int) -> tuple[float, ...]:
        """(prefill step, decode step, both in one, streams alone, streams with the prompt), medians in ms of CPU time."""
        kv = self._reserve(num_tokens)
        ids, prompt = list(range(7, 7 + num_tokens)), range(num_tokens - 1)
        last = decode_segment(kv, ids[-1:], range(num_tokens - 1, num_tokens))
        own = prefill_segments(kv, ids[:-1], prompt)
        whole = [*local_prefill_segments(kv, ids[:-1], prompt), last]
        ways: tuple[list[Segment], ...] = (own, [last], whole, self._streams, [*self._streams, *whole])
        times = [[self._time(segments) for segments in ways] for _ in range(REPEATS + 1)][1:]
        self._tables.release()
        return tuple(statistics.median(column) for column in zip(*times, strict=True))

    def _time(self, segments: list[Segment], clock: Callable[[], float] = time.process_time) -> float:
        begin = clock()
        self._decoder.forward(segments, self._pool).run()
        return (clock() - begin) * 1e3

    def run(self) -> None:
        print(
            "| prompt | prefill + decode step | one step on decode | a step of 4 streams | with the prompt in it |\n"
            "|---|---|---|---|---|"
        )
        for num_tokens in LENGTHS:
            prefill, decode, whole, streams, mixed = self.measure(num_tokens)
            print(
                f"| {num_tokens} | {prefill:.0f} + {decode:.0f} = {prefill + decode:.0f} | {whole:.0f} "
                f"| {streams:.0f} | {mixed:.0f} |"
            )


if __name__ == "__main__":
    Steps().run()
