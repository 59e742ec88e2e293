"""A router over fake workers, in one process, reached over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc

from shoal.config.router import RouterConfig
from shoal.model_files import open_model
from shoal.pb.internal.v1 import controller_pb2
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.router.app import Router
from shoal.rpc import open_channel
from shoal.visibility import Visibility
from tests.fakes.workers import FakeDecodeWorker, FakePrefillWorker, FakeWorker, Wire, until

VISIBILITIES = ("full", "speed:22", "pop:20")


class Board:
    """An endpoint source that a test writes to."""

    def __init__(self) -> None:
        self.states: dict[FakeWorker, str] = {}
        self._changed = asyncio.Event()
        self._version = 0

    def set(self, worker: FakeWorker, state: str) -> None:
        self.states[worker] = state
        self.publish()

    def publish(self) -> None:
        self._changed.set()

    async def lists(self) -> AsyncIterator[controller_pb2.Endpoints]:
        while True:
            self._changed.clear()
            self._version += 1
            yield controller_pb2.Endpoints(
                version=self._version,
                endpoints=[controller_pb2.Endpoint(worker=w.description, state=s) for w, s in self.states.items()],
            )
            await self._changed.wait()


class Cluster:
    """`async with Cluster(2, 1) as c:` two prefill workers, one decode worker, a router, a stub."""

    def __init__(self, num_prefill: int = 1, num_decode: int = 1, **settings: Any) -> None:
        self.wire, self.board = Wire(), Board()
        self.num_usable = settings.pop("num_usable", num_prefill + num_decode)
        revision = settings.pop("revision", None) or open_model("smollm2-135m").revision
        self.prefill = [FakePrefillWorker(self.wire, revision, f"prefill-{i}") for i in range(num_prefill)]
        self.decode = [FakeDecodeWorker(self.wire, revision, f"decode-{i}") for i in range(num_decode)]
        visibilities = tuple(Visibility.parse(text) for text in settings.pop("visibilities", VISIBILITIES))
        self.config = RouterConfig(
            model="smollm2-135m",
            listen="127.0.0.1:0",
            http_listen="127.0.0.1:0",
            controller="127.0.0.1:1",
            visibilities=visibilities,
            **({"local_prefill_tokens": 0} | settings),
        )

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    async def __aenter__(self) -> Self:
        for worker in self.workers:
            await worker.start()
            self.board.states[worker] = "ready"
        self.router = Router(self.config, endpoints=self.board)
        self.address = str(await self.router.start())
        self.http = f"http://{self.router.http_address}"
        self.channel = open_channel(self.address)
        self.stub = shoal_pb2_grpc.ShoalStub(self.channel)
        await until(lambda: sum(w.state == "ready" for w in self.router.registry.workers) >= self.num_usable)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.channel.close(None)
        await self.router.stop()
        for worker in self.workers:
            await worker.stop()

    async def replies(self, request: shoal_pb2.GenerateRequest, **call: Any) -> list[shoal_pb2.GenerateResponse]:
        return [reply async for reply in self.stub.Generate(request, **call)]

    async def complete(self, request: shoal_pb2.GenerateRequest, **call: Any) -> shoal_pb2.GenerateComplete:
        """The only message of a unary answer."""
        [reply] = await self.replies(request, **call)
        return reply.complete

    async def status(self, request: shoal_pb2.GenerateRequest, **call: Any) -> tuple[grpc.StatusCode, str]:
        """How a request that must fail does so."""
        try:
            replies = await self.replies(request, **call)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(f"the request succeeded with {len(replies)} messages")


def request(ids: list[int] | None = None, **fields: Any) -> shoal_pb2.GenerateRequest:
    """A request of token ids (ten of them by default) and sampling fields, e.g. request(max_tokens=4, stream=True)."""
    own = {
        name: fields.pop(name)
        for name in ("visibility", "request_id", "stream", "text", "chat", "priority", "cache_salt")
        if name in fields
    }
    message = shoal_pb2.GenerateRequest(sampling_params=shoal_pb2.SamplingParams(**fields), **own)
    if "text" not in own and "chat" not in own:
        message.tokenized.input_ids.extend(range(10, 20) if ids is None else ids)
    return message
