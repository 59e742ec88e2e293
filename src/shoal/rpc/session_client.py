"""A caller's end of a session: many calls over one stream to one server. Knows envelopes; of their messages only the bytes.

A call is used as one of grpc.aio: `read` until EOF, `cancel`. It ends with the error that a call of its own would have ended
with; the stream's end ends all of its calls with UNAVAILABLE.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from shoal.errors import InternalError
from shoal.pb.internal.v1 import session_pb2 as pb
from shoal.pb.internal.v1 import session_pb2_grpc
from shoal.rpc.session_wire import gather, to_pairs, to_pb

LARGE_BYTES: Final = 256 << 10  # a request beyond this would hold up the others: it is worth a call of its own
MANY_MESSAGES: Final = 64  # unread, of one call: then it is paused, and what comes next gathers at the server
_log = logging.getLogger(__name__)
_WAITING: Final = "waiting"


class SessionCall:
    """One call. One reader at a time; whoever leaves it unread cancels it."""

    __slots__ = ("_end", "_is_paused", "_messages", "_parse", "_session", "_timer", "_waiter", "number")

    def __init__(self, session: "Session", number: int, parse: Callable[[bytes], Any], timeout_s: float | None) -> None:
        self.number = number
        self._session = session
        self._parse = parse
        self._messages: deque[bytes] = deque()
        self._end: BaseException | str = _WAITING  # else "" for a good end, or what reading raises
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, self._expire)

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF. Raises AioRpcError, and CancelledError once it was cancelled here."""
        while not self._messages:
            if self._end is not _WAITING:
                if isinstance(self._end, BaseException):
                    raise self._end
                return grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                self._waiter = None
        message = self._messages.popleft()
        if self._is_paused and not self._messages and self._end is _WAITING:
            self._is_paused = False
            self._session.say(pb.SessionRequest(call=self.number, resume=pb.ResumeCall()))
        return self._parse(message)

    def cancel(self) -> None:
        """Leave it: the server is told, and reading raises CancelledError. Harmless after its end."""
        if self._end is _WAITING:
            self._session.leave(self.number)
            self._messages.clear()
            self.end(asyncio.CancelledError())

    def push(self, message: bytes) -> None:
        """A message has come."""
        self._messages.append(message)
        self._wake()
        if len(self._messages) >= MANY_MESSAGES and not self._is_paused:
            self._is_paused = True
            self._session.say(pb.SessionRequest(call=self.number, pause=pb.PauseCall()))

    def end(self, error: BaseException | None) -> None:
        """No more comes. What has come is still read first."""
        if self._end is _WAITING:
            self._end = error or ""
            if self._timer is not None:
                self._timer.cancel()
            self._wake()

    def _expire(self) -> None:
        self._session.leave(self.number)
        self.end(_rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Session:
    """The calls of one stream. `run` opens it and returns or raises at its end; calls may start while it `is_open`."""

    def __init__(self, channel: grpc.aio.Channel, on_open: Callable[[], object] = lambda: None) -> None:
        self._on_open = on_open
        self._stub: Any = session_pb2_grpc.SessionsStub(channel)
        self._calls: dict[int, SessionCall] = {}
        self._last = 0
        self._outgoing: deque[pb.SessionRequest] = deque()
        self._news = asyncio.Event()
        self.is_open = False
        self.was_open = False

    @property
    def num_calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def start(
        self,
        method: str,
        message: bytes,
        parse: Callable[[bytes], Any],
        timeout_s: float | None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> SessionCall:
        """Begin a call while the session is open. `parse` reads each of its messages."""
        if not self.is_open:
            raise InternalError("a call was begun on a session that is not open")
        self._last += 1
        call = self._calls[self._last] = SessionCall(self, self._last, parse, timeout_s)
        start = pb.StartCall(method=method, message=message, timeout_s=timeout_s, metadata=to_pb(metadata))
        self.say(pb.SessionRequest(call=call.number, start=start))
        return call

    def say(self, request: pb.SessionRequest) -> None:
        """To the server, with whatever else is ready by then."""
        if self.is_open:
            self._outgoing.append(request)
            self._news.set()

    def leave(self, number: int) -> None:
        """Hear no more of a call, and tell the server."""
        if self._calls.pop(number, None) is not None:
            self.say(pb.SessionRequest(call=number, cancel=pb.CancelCall()))

    async def run(self) -> None:
        """Open the stream and serve it. Raises AioRpcError of its end, InternalError for envelopes that make no sense."""
        stream = self._stub.Open()
        writing: asyncio.Task[None] | None = None
        why = "the server ended it"
        try:
            if await stream.read() is grpc.aio.EOF:  # type: ignore[attr-defined]
                return
            self.is_open = self.was_open = True
            self._on_open()
            writing = asyncio.create_task(self._write(stream))
            while (replies := await stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                for reply in replies.replies:
                    self._take(reply)
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
            raise
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                why = "it was closed here"
                raise
            why = "the server cancelled it"  # grpc.aio tells that in this way
            raise _rpc_error(grpc.StatusCode.UNAVAILABLE, why) from None
        except DecodeError:
            why = "the server sent what is no envelope"
            raise InternalError(why) from None
        except InternalError as error:
            why = str(error)
            raise
        finally:
            self.is_open = False
            stream.cancel()
            calls, self._calls = self._calls, {}
            for call in calls.values():
                call.end(_rpc_error(grpc.StatusCode.UNAVAILABLE, f"the session with the server was lost ({why})"))
            if writing is not None:
                writing.cancel()
                await asyncio.wait({writing})

    async def _write(self, stream: Any) -> None:
        """Ends with the stream; why it ended, the reading side is told."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._outgoing:
                requests = gather(self._outgoing)
                try:
                    await stream.write(pb.SessionRequests(requests=requests))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return

    def _take(self, reply: pb.SessionReply) -> None:
        call = self._calls.get(reply.call)
        if call is None:
            if not 0 < reply.call <= self._last:
                raise InternalError(f"the server answers call {reply.call}, which was never begun")
            return  # it was left, and the server did not know yet
        match reply.WhichOneof("kind"):
            case "message":
                call.push(reply.message)
            case "end":
                del self._calls[reply.call]
                call.end(_error_of(reply.end))
            case other:
                raise InternalError(f"the server sent a reply of kind {other}")


_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


def _error_of(end: pb.EndOfCall) -> grpc.aio.AioRpcError | None:
    if end.code == 0:
        return None
    return _rpc_error(_CODES.get(end.code, grpc.StatusCode.UNKNOWN), end.details, to_pairs(end.trailing))


def _rpc_error(code: grpc.StatusCode, details: str, trailing: Iterable[tuple[str, str]] = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details, None)
