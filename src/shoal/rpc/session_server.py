"""A server's end of sessions: runs the methods of its services for calls that share one stream. Knows envelopes; no service.

Each call has a task of its own and with it a context, as a call of gRPC has. Its handler is the same, errors become statuses by
the same table, and the stream's end, however it comes, cancels it.
"""

import asyncio
import inspect
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from shoal.errors import InvalidRequest
from shoal.pb.internal.v1 import session_pb2 as pb
from shoal.pb.internal.v1 import session_pb2_grpc
from shoal.rpc.channel import MAX_MESSAGE_BYTES
from shoal.rpc.session_wire import gather, to_pairs, to_pb

_MAX_WAITING, _MAX_WAITING_BYTES = 256, 4 << 20  # replies unsent, of all calls together: beyond it handlers wait for the stream
_MAX_REPLY_BYTES: Final = MAX_MESSAGE_BYTES - 1024  # with its envelope
_log = logging.getLogger(__name__)


class SessionServicer(session_pb2_grpc.SessionsServicer):
    """One per server. `handlers`: its methods by path, their errors translated; those with one request message can be called."""

    def __init__(self, handlers: Mapping[str, Any]) -> None:
        self._handlers = {
            path: handler
            for path, handler in handlers.items()
            if inspect.isasyncgenfunction(handler.unary_stream) or inspect.iscoroutinefunction(handler.unary_unary)
        }
        self._sessions: set[_Session] = set()
        self.is_draining = False

    async def Open(self, requests: AsyncIterator[pb.SessionRequests], context: Any) -> None:
        session = _Session(self, context)
        self._sessions.add(session)
        try:
            await session.run(requests)
        finally:
            self._sessions.discard(session)

    def drain(self) -> None:
        """No call starts any more, and each session ends with its last one."""
        self.is_draining = True
        for session in self._sessions:
            session.look()

    def handler(self, method: str) -> Any:
        """What answers a method; None when it cannot be called this way."""
        return self._handlers.get(method)


class SessionContext:
    """What a handler may ask of its call: a part of grpc.aio.ServicerContext."""

    def __init__(self, timeout_s: float | None, metadata: tuple[tuple[str, str], ...]) -> None:
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._metadata = metadata
        self.end = pb.EndOfCall()

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> None:
        """End the call with this status: raises what grpc.aio raises."""
        self.end = _end(code, details, trailing_metadata)
        raise grpc.aio.AbortError


class _Call:
    """One call's task, and whether its caller wants to wait."""

    __slots__ = ("goes_on", "is_late", "task", "timer")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.goes_on: asyncio.Event | None = None  # there while it is paused
        self.is_late = False

    def expire(self) -> None:
        self.is_late = True
        if self.task is not None:
            self.task.cancel()


class _Session:
    """One stream and its calls."""

    def __init__(self, server: SessionServicer, context: Any) -> None:
        self._server, self._context = server, context
        self._calls: dict[int, _Call] = {}
        self._last = 0
        self._outgoing: deque[pb.SessionReply] = deque()
        self._waiting_bytes = 0
        self._is_writing = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._is_over = asyncio.Event()

    async def run(self, requests: AsyncIterator[pb.SessionRequests]) -> None:
        """Until the caller ends the stream or it breaks, or the last call of a draining server has ended."""
        await self._context.write(pb.SessionReplies())
        reading, writing = asyncio.create_task(self._read(requests)), asyncio.create_task(self._write())
        over: asyncio.Task[Any] = asyncio.create_task(self._is_over.wait())
        self.look()
        try:
            await asyncio.wait({reading, writing, over}, return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, writing):
                if task.done():
                    task.result()
        finally:
            calls = [call.task for call in self._calls.values() if call.task is not None]
            for task in (reading, writing, over, *calls):
                task.cancel()
            await asyncio.wait({reading, writing, over, *calls})

    def look(self) -> None:
        """Whether there is nothing more to do."""
        if self._server.is_draining and not self._calls and not self._outgoing and not self._is_writing:
            self._is_over.set()

    async def _read(self, requests: AsyncIterator[pb.SessionRequests]) -> None:
        try:
            async for batch in requests:
                for request in batch.requests:
                    self._take(request)
        except DecodeError:
            raise InvalidRequest("the session brought what is no envelope") from None

    def _take(self, request: pb.SessionRequest) -> None:
        kind, call = request.WhichOneof("kind"), self._calls.get(request.call)
        if kind == "start":
            if request.call <= self._last:
                raise InvalidRequest(f"call {request.call} of the session was begun before; numbers must grow")
            self._last = request.call
            self._start(request.call, request.start)
            return
        if request.call > self._last or kind is None:
            raise InvalidRequest(f"the session brought {kind or 'nothing known'} for call {request.call}, which was never begun")
        if call is None or call.task is None:
            return  # it has ended, and the caller did not know yet
        match kind:
            case "cancel":
                call.task.cancel()
            case "pause":
                call.goes_on = call.goes_on or asyncio.Event()
            case "resume" if call.goes_on is not None:
                call.goes_on.set()
                call.goes_on = None

    def _start(self, number: int, start: pb.StartCall) -> None:
        call = self._calls[number] = _Call()
        call.task = asyncio.create_task(self._run(number, call, start))
        call.task.add_done_callback(lambda _: self._forget(number))  # one cancelled in the message that began it never runs
        if start.HasField("timeout_s"):
            call.timer = asyncio.get_running_loop().call_later(max(0.0, start.timeout_s), call.expire)

    async def _run(self, number: int, call: _Call, start: pb.StartCall) -> None:
        timeout_s = start.timeout_s if start.HasField("timeout_s") else None
        context = SessionContext(timeout_s, to_pairs(start.metadata))
        try:
            await self._answer(number, call, start, context)
        except grpc.aio.AbortError:
            self._say(pb.SessionReply(call=number, end=context.end))
        except asyncio.CancelledError:
            code = grpc.StatusCode.DEADLINE_EXCEEDED if call.is_late else grpc.StatusCode.CANCELLED
            self._say(pb.SessionReply(call=number, end=_end(code)))  # harmless when the caller knows
        else:
            self._say(pb.SessionReply(call=number, end=pb.EndOfCall()))

    def _forget(self, number: int) -> None:
        call = self._calls.pop(number)
        if call.timer is not None:
            call.timer.cancel()
        self.look()

    async def _answer(self, number: int, call: _Call, start: pb.StartCall, context: SessionContext) -> None:
        handler = self._server.handler(start.method)
        if self._server.is_draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping; use another")
        if handler is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"no method {start.method} can be called in a session")
        write = handler.response_serializer
        if handler.unary_unary is not None:
            response = write(await handler.unary_unary(start.message, context))
            await self._send(number, call, response, context)
            return
        async for response in handler.unary_stream(start.message, context):
            await self._send(number, call, write(response), context)

    async def _send(self, number: int, call: _Call, message: bytes, context: SessionContext) -> None:
        """One message of a call. Waits while the caller has paused it, or too much is unsent."""
        if len(message) > _MAX_REPLY_BYTES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"an answer of {len(message)} bytes exceeds the limit of {_MAX_REPLY_BYTES}"
            )
        self._waiting_bytes += len(message)
        self._say(pb.SessionReply(call=number, message=message))
        while self._waiting_bytes > _MAX_WAITING_BYTES or len(self._outgoing) > _MAX_WAITING:
            self._room.clear()
            await self._room.wait()
        if call.goes_on is not None:
            await call.goes_on.wait()

    def _say(self, reply: pb.SessionReply) -> None:
        self._outgoing.append(reply)
        self._news.set()

    async def _write(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._outgoing:
                replies = gather(self._outgoing)
                self._is_writing = True  # they are in no queue any more, and not sent yet
                await self._context.write(pb.SessionReplies(replies=replies))
                self._is_writing = False
                self._waiting_bytes -= sum(len(reply.message) for reply in replies)
                self._room.set()
            self.look()


def _end(code: grpc.StatusCode, details: str = "", trailing: Iterable[tuple[str, str | bytes]] = ()) -> pb.EndOfCall:
    return pb.EndOfCall(code=code.value[0], details=details, trailing=to_pb(trailing))
