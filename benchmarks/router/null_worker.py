"""A decode worker that answers at once, or at the rate that a request's seed tells. Knows the protocol; computes nothing.

`python -m benchmarks.router.null_worker MODEL` prints its address as JSON and serves until SIGTERM. It calls itself colocated,
so that no prefill worker is needed.
"""

import asyncio
import itertools
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

import uvloop

from shoal.model_files import open_model
from shoal.pb.internal.v1 import worker_pb2 as pb
from tests.fakes.workers import FakeDecodeWorker, Wire

TOKEN_IDS: Final = tuple(range(1000, 1064))  # of ordinary text
_numbers = itertools.count()


class NullDecodeWorker(FakeDecodeWorker):
    """The first token leaves at once; the others one by one, `seed` a second (0: as fast as they are taken)."""

    def __init__(self, model: str) -> None:
        files = open_model(model)
        super().__init__(Wire(), files.revision, "decode-0", allowed=("full",))
        self.description.colocated = True
        self.description.fingerprint.num_layers = files.config.shape.num_layers
        self._events_of = [pb.DecodeEvent(tokens=pb.SampledTokens(token_ids=[token_id])) for token_id in TOKEN_IDS]

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> AsyncIterator[pb.DecodeEvent]:
        yield pb.DecodeEvent(
            reserved=pb.Reserved(
                attempt_id=f"attempt-{next(_numbers)}", visibility=request.visibility, plan_digest="null", lease_s=30,
                worker_id=self.worker_id, epoch=self.description.epoch, prefill_at="decode_worker", prefill_reason="colocated",
            )
        )  # fmt: skip
        clock, rate = asyncio.get_running_loop().time, request.sampling.seed
        begin = clock()
        for index in range(request.sampling.max_tokens):
            if rate and index:
                await asyncio.sleep(max(0.0, begin + index / rate - clock()))
            yield self._events_of[index % len(self._events_of)]
        yield pb.DecodeEvent(finished=pb.Finished(finish_reason="length"))


async def serve(model: str) -> None:
    """Until SIGTERM."""
    worker, stopping = NullDecodeWorker(model), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await worker.start()
    print(json.dumps({"address": worker.description.address}), flush=True)
    await stopping.wait()
    await worker.stop()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
