"""The asyncio client: the same calls as the synchronous one, awaited."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from shoal.client.requests import Prompt, Sampling, build_request, read_error
from shoal.client.types import Chunk, Completion, read_reply
from shoal.errors import Cancelled, InternalError
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import open_channel


class AsyncClient:
    """A connection to a router, for asyncio.

    async with AsyncClient("127.0.0.1:50051") as client:
        done = await client.complete("Why do fish swim in shoals?", sampling=Sampling(max_tokens=64))
    """

    def __init__(self, address: str = "127.0.0.1:50051", *, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.address = address
        self._channel = open_channel(address, credentials)
        self._stub: Any = shoal_pb2_grpc.ShoalStub(self._channel)

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        visibility: str | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk | Completion, None]:
        """Stream an answer: chunks as they come, then one Completion. Closing the generator cancels the request."""
        request = build_request(
            prompt, system=system, raw=raw, token_ids=token_ids, sampling=sampling, visibility=visibility,
            request_id=request_id, stream=True,
        )  # fmt: skip
        return self._events(request, timeout_s)

    async def complete(
        self,
        prompt: Prompt | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        visibility: str | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole answer at once."""
        request = build_request(
            prompt, system=system, raw=raw, token_ids=token_ids, sampling=sampling, visibility=visibility,
            request_id=request_id, stream=False,
        )  # fmt: skip
        async for event in self._events(request, timeout_s):
            if isinstance(event, Completion):
                return event
        raise InternalError("the server ended the stream without an answer")

    async def abort(self, *request_ids: str) -> int:
        """End running requests with these ids; returns how many there were."""
        reply = await self._call(self._stub.Abort, shoal_pb2.AbortRequest(request_ids=request_ids))
        return int(reply.num_aborted)

    async def model_info(self) -> shoal_pb2.GetModelInfoResponse:
        """The served model and what requests may ask for."""
        reply: shoal_pb2.GetModelInfoResponse = await self._call(self._stub.GetModelInfo, shoal_pb2.GetModelInfoRequest())
        return reply

    async def server_info(self) -> shoal_pb2.GetServerInfoResponse:
        """Version, uptime and the workers that the router knows."""
        reply: shoal_pb2.GetServerInfoResponse = await self._call(self._stub.GetServerInfo, shoal_pb2.GetServerInfoRequest())
        return reply

    async def loads(self) -> Sequence[shoal_pb2.WorkerLoad]:
        """What every worker holds now."""
        reply: shoal_pb2.GetLoadsResponse = await self._call(self._stub.GetLoads, shoal_pb2.GetLoadsRequest())
        return reply.loads

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _events(
        self, request: shoal_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[Chunk | Completion, None]:
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for reply in call:
                yield read_reply(reply)
        except grpc.aio.AioRpcError as error:
            raise read_error(error, self.address) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Cancelled("the server cancelled the request") from None
        finally:
            call.cancel()

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=10.0)
        except grpc.aio.AioRpcError as error:
            raise read_error(error, self.address) from None
