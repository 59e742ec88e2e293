"""A router over real workers of a tiny model, all in this process, reached over real gRPC; and the single-process reference."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shoal.config.router import RouterConfig
from shoal.config.worker import Pool
from shoal.decode_worker.worker import DecodeWorker
from shoal.engine.decoder import Decoder
from shoal.engine.kv_pool import KvPool
from shoal.engine.local import LocalEngine, LocalRequest, LocalResult
from shoal.engine.vision import VisionEncoder
from shoal.engine.vision.tower import VisionTower
from shoal.engine.weights import HeldLayers
from shoal.model_files import open_model
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.prefill_worker.worker import PrefillWorker
from shoal.router.app import Router
from shoal.rpc import open_channel
from shoal.types import DType
from shoal.visibility import Visibility
from tests.e2e.harness import MIXED, Endpoint, make_config
from tests.fakes.workers import until

torch.set_num_threads(1)  # the reference shares two cores with the workers


@cache
def reference(model: Path) -> Decoder:
    files = open_model(str(model))
    return Decoder.load(files, dtype=DType.FLOAT32, held=HeldLayers.everything(files.config.shape.num_layers))[0]


@cache
def reference_vision(model: Path) -> VisionEncoder | None:
    """None for a model of text alone."""
    files = open_model(str(model))
    return None if files.vision is None else VisionEncoder(VisionTower.load(files, DType.FLOAT32))


def local(model: Path, requests: Iterable[LocalRequest], **options: int) -> list[LocalResult]:
    """What one process answers, in a batch of its own."""
    decoder = reference(model)
    pool = KvPool(decoder.config.shape, 4096, 8, DType.FLOAT32)
    return LocalEngine(decoder, pool, vision=reference_vision(model), **options).generate(requests)


@dataclass
class Served:
    """`stub` is the router's; `decode` and `prefill` are the workers'."""

    stub: shoal_pb2_grpc.ShoalStub
    router: Router
    prefill: list[PrefillWorker]
    decode: list[DecodeWorker]
    decode_ends: list[Endpoint]
    address: str

    async def replies(self, request: shoal_pb2.GenerateRequest, **call: Any) -> list[shoal_pb2.GenerateResponse]:
        return [reply async for reply in self.stub.Generate(request, **call)]

    async def completes(self, request: shoal_pb2.GenerateRequest, **call: Any) -> list[shoal_pb2.GenerateComplete]:
        """One for each child, in their order."""
        replies = await self.replies(request, **call)
        found = [reply.complete for reply in replies if reply.HasField("complete")]
        return sorted(found, key=lambda complete: complete.index)

    async def busy_worker(self) -> DecodeWorker:
        """A decode worker that runs something, once one does."""
        await until(lambda: any(worker.load().num_running_reqs for worker in self.decode), timeout_s=10)
        return next(worker for worker in self.decode if worker.load().num_running_reqs)

    async def abort(self, request_id: str) -> None:
        """Abort it, as soon as it is known."""
        num_aborted = 0
        while not num_aborted:
            num_aborted = (await self.stub.Abort(shoal_pb2.AbortRequest(request_ids=[request_id]))).num_aborted

    async def stop(self, worker: DecodeWorker) -> None:
        """End a decode worker, with whatever it runs."""
        at = self.decode.index(worker)
        del self.decode[at], self.decode_ends[at]
        await worker.stop(0.0)

    async def all_free(self) -> None:
        """Wait until no worker holds anything."""
        for end in self.decode_ends:
            await end.idle(Pool.DECODE)


@asynccontextmanager
async def served(
    model: Path,
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    router: dict[str, Any] | None = None,
    decode: Sequence[dict[str, Any]] = (),
    **worker: Any,
) -> AsyncIterator[Served]:
    """`decode` are changes to the configuration of single decode workers, `worker` to all. Idle at the end, or it fails."""
    async with AsyncExitStack() as stack:
        prefill = [PrefillWorker(make_config(Pool.PREFILL, model, f"prefill-{i}", **worker)) for i in range(num_prefill)]
        own = [dict(decode[i]) if i < len(decode) else {} for i in range(num_decode)]
        decoders = [DecodeWorker(make_config(Pool.DECODE, model, f"decode-{i}", **(worker | own[i]))) for i in range(num_decode)]
        addresses = []
        for each in (*prefill, *decoders):
            addresses.append(f"{each.config.pool}={await each.start()}")
            stack.push_async_callback(each.stop, 0.0)
        visibilities = tuple(Visibility.parse(text) for text in MIXED)
        settings: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "visibilities": visibilities,
            "flush_s": 0.0,
            "local_prefill_tokens": 0,
        } | (router or {})
        front = Router(RouterConfig(str(model), workers=tuple(addresses), **settings))
        address = str(await front.start())
        channel = open_channel(address)
        stack.push_async_callback(front.stop)
        stack.push_async_callback(channel.close, None)
        ends = [Endpoint(each.address) for each in decoders]
        for end in ends:
            stack.push_async_callback(end.close)
        await until(lambda: sum(worker.state == "ready" for worker in front.registry.workers) == len(addresses), timeout_s=10)
        found = Served(shoal_pb2_grpc.ShoalStub(channel), front, prefill, decoders, ends, address)
        yield found
        await found.all_free()


def ask(
    prompt_ids: Sequence[int], visibility: str = "full", *, stream: bool = False, **sampling: Any
) -> shoal_pb2.GenerateRequest:
    """A request of token ids that runs to max_tokens unless told otherwise."""
    params = shoal_pb2.SamplingParams(**({"ignore_eos": True, "max_tokens": 6} | sampling))
    tokenized = shoal_pb2.TokenizedInput(input_ids=prompt_ids)
    return shoal_pb2.GenerateRequest(tokenized=tokenized, visibility=visibility, stream=stream, sampling_params=params)
