"""The asyncio client: the same calls as the synchronous one, awaited."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from shoal.client.connection import CALL_TIMEOUT_S, Attempts, Retry, bearer
from shoal.client.requests import Options, Prompt, Text, build_request, build_score, build_tokenize, check_one, read_error
from shoal.client.types import Chunk, Completion, Image, Score, only_one, read_reply
from shoal.errors import Cancelled, InternalError
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import open_channel


class AsyncClient:
    """A connection to a router, for asyncio.

    async with AsyncClient("127.0.0.1:50051") as client:
        done = await client.complete("Why do fish swim in shoals?", sampling=Sampling(max_tokens=64))
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        retry: Retry = Retry(),  # noqa: B008  (frozen)
    ) -> None:
        """`credentials` (see `tls_credentials`) turn TLS on; `token` goes with every call."""
        self.address = address
        self._retry, self._metadata = retry, bearer(token)
        self._channel = open_channel(address, credentials)
        self._stub: Any = shoal_pb2_grpc.ShoalStub(self._channel)

    def generate(
        self, prompt: Prompt | None = None, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk | Completion, None]:
        """Stream an answer: chunks as they come, and one Completion for each of n. Closing the generator cancels the request."""
        return self._events(build_request(prompt, options, stream=True), timeout_s)

    async def complete(
        self, prompt: Prompt | None = None, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The whole answer at once. Raises InvalidRequest for n > 1."""
        check_one(options)
        return only_one(await self.complete_all(prompt, timeout_s=timeout_s, **options))

    async def complete_all(
        self, prompt: Prompt | None = None, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> tuple[Completion, ...]:
        """All n answers, by index."""
        events = self._events(build_request(prompt, options, stream=False), timeout_s)
        return tuple(sorted([e async for e in events if isinstance(e, Completion)], key=lambda done: done.index))

    async def score(
        self,
        prompt: Text,
        continuation: Text,
        *,
        logprobs: int = 0,
        visibility: str | None = None,
        request_id: str = "",
        model: str = "",
        images: Sequence[Image] = (),
        timeout_s: float | None = None,
    ) -> Score:
        """How likely `continuation` is after `prompt`, each a text or token ids."""
        request = build_score(
            prompt, continuation, logprobs=logprobs, visibility=visibility, request_id=request_id, model=model, images=images
        )  # fmt: skip
        return Score.read(await self._call(self._stub.Score, request, timeout_s))

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        add_special_tokens: bool | None = None,
        images: Sequence[Image] = (),
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> tuple[int, ...]:
        """Ids of a prompt as `generate` would run it; of a raw text also without the tokenizer's own special tokens."""
        request = build_tokenize(prompt, raw=raw, add_special_tokens=add_special_tokens, images=images)
        return tuple((await self._call(self._stub.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        request = shoal_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._call(self._stub.Detokenize, request)).text)

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
        attempts = Attempts(self._retry, timeout_s)
        while True:
            started = False
            call = self._stub.Generate(request, timeout=attempts.time_left_s, metadata=self._metadata)
            try:
                async for reply in call:
                    started = True
                    yield read_reply(reply)
                if not started:
                    raise InternalError("the server ended the stream without an answer")
                return
            except grpc.aio.AioRpcError as error:
                pause_s = attempts.pause_s(read_error(error, self.address), started=started)
            except asyncio.CancelledError:
                if _is_ours():
                    raise
                raise Cancelled("the server cancelled the request") from None
            finally:
                call.cancel()
            await asyncio.sleep(pause_s)

    async def _call(self, method: Any, request: Any, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        attempts = Attempts(self._retry, timeout_s)
        while True:
            try:
                return await method(request, timeout=attempts.time_left_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                pause_s = attempts.pause_s(read_error(error, self.address), started=False)
            except asyncio.CancelledError:
                if _is_ours():
                    raise
                raise Cancelled("the server cancelled the call") from None
            await asyncio.sleep(pause_s)


def _is_ours() -> bool:
    """Whether it is this task that is being cancelled: grpc.aio raises the same for a call that its server cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
