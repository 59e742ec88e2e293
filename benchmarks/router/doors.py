"""Three ways to ask for tokens: the worker itself, the router's gRPC door, its HTTP door. Knows each protocol; keeps no figures.

HTTP is spoken over a bare connection, so that no client library's time is taken for the router's.
"""

import asyncio
import json
import time
from types import TracebackType
from typing import Any, Final, Protocol, Self

from shoal.pb.internal.v1 import worker_pb2 as worker_pb
from shoal.pb.internal.v1 import worker_pb2_grpc
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import open_channel

PROMPT: Final = tuple(range(1000, 1032))
VISIBILITY: Final = "full:boundary=1"


class Door(Protocol):
    """`rate`: tokens a second that the null worker gives, 0 for at once."""

    async def stream(self, num_tokens: int, rate: int = 0) -> float:
        """Seconds to the first token of a streamed answer, which is read to its end."""

    async def whole(self, num_tokens: int, rate: int = 0) -> float:
        """Seconds to a whole answer that is not streamed."""


class Worker:
    """The null worker without a router."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub: Any = worker_pb2_grpc.DecodeWorkerStub(self._channel)

    async def stream(self, num_tokens: int, rate: int = 0) -> float:
        begin, first_s = time.perf_counter(), None
        async for event in self._call(num_tokens, rate):
            if first_s is None and event.HasField("tokens"):
                first_s = time.perf_counter() - begin
        assert first_s is not None
        return first_s

    async def whole(self, num_tokens: int, rate: int = 0) -> float:
        begin = time.perf_counter()
        async for _ in self._call(num_tokens, rate):
            continue
        return time.perf_counter() - begin

    def _call(self, num_tokens: int, rate: int) -> Any:
        sampling = worker_pb.Sampling(max_tokens=num_tokens, top_p=1.0, seed=rate)
        return self._stub.Decode(worker_pb.DecodeRequest(prompt_ids=PROMPT, visibility=VISIBILITY, sampling=sampling))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._channel.close(None)


class Grpc:
    """The router's gRPC door."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub: Any = shoal_pb2_grpc.ShoalStub(self._channel)

    async def stream(self, num_tokens: int, rate: int = 0) -> float:
        begin, first_s = time.perf_counter(), None
        async for reply in self._call(num_tokens, rate, stream=True):
            if first_s is None and reply.HasField("chunk"):
                first_s = time.perf_counter() - begin
        assert first_s is not None
        return first_s

    async def whole(self, num_tokens: int, rate: int = 0) -> float:
        begin = time.perf_counter()
        async for _ in self._call(num_tokens, rate, stream=False):
            continue
        return time.perf_counter() - begin

    def _call(self, num_tokens: int, rate: int, *, stream: bool) -> Any:
        request = shoal_pb2.GenerateRequest(stream=stream)
        request.tokenized.input_ids.extend(PROMPT)
        request.sampling_params.CopyFrom(shoal_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=rate))
        return self._stub.Generate(request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._channel.close(None)


class Http:
    """The router's HTTP door: /v1/completions, streamed as server-sent events. Connections are kept and used again."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def stream(self, num_tokens: int, rate: int = 0) -> float:
        begin, first_s = time.perf_counter(), None
        reader, writer, _ = await self._ask({"stream": True, "max_tokens": num_tokens, "seed": rate})
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if not line:
                raise RuntimeError("the router closed the connection within an answer")
            if first_s is None and line.startswith(b"data: "):
                first_s = time.perf_counter() - begin
        while await reader.readline() not in (b"0\r\n", b""):
            continue
        await reader.readline()
        self._idle.append((reader, writer))
        assert first_s is not None
        return first_s

    async def whole(self, num_tokens: int, rate: int = 0) -> float:
        begin = time.perf_counter()
        reader, writer, length = await self._ask({"max_tokens": num_tokens, "seed": rate})
        await reader.readexactly(length)
        self._idle.append((reader, writer))
        return time.perf_counter() - begin

    async def _ask(self, fields: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        """Send a request and read the head of its answer, which tells the body's length, 0 for a stream."""
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        body = json.dumps({"prompt": PROMPT, "ignore_eos": True, **fields}).encode()
        head = ("POST /v1/completions HTTP/1.1", "Host: shoal", "Content-Type: application/json", f"Content-Length: {len(body)}")
        writer.write("\r\n".join((*head, "", "")).encode() + body)
        status, length = await reader.readline(), 0
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if b" 200 " not in status:
            raise RuntimeError(f"the router answered {status.decode().strip()}: {(await reader.read(500)).decode()}")
        return reader, writer, length

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for _, writer in self._idle:
            writer.close()
