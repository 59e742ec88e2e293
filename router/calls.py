"""Requests' calls to one worker: over its session if there is one, else each a call of its own. Knows methods; no request.

A session only saves time. While none is open (it is being opened, was lost, or the worker is too old to know it) calls go as
they always can, so no request waits for one.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from shoal.errors import InternalError
from shoal.pb.internal.v1 import worker_pb2
from shoal.router.instruments import LOST_SESSIONS, PLAIN_CALLS, SESSIONS
from shoal.rpc import Session, SessionCall
from shoal.rpc.session_client import LARGE_BYTES
from shoal.rpc.tracing import trace_metadata

_DECODE: Final = "/shoal.internal.v1.DecodeWorker/Decode"
_PREFILL: Final = "/shoal.internal.v1.PrefillWorker/Prefill"
_log = logging.getLogger(__name__)


class WorkerCalls:
    """One per worker. Its sessions are opened when the worker is known to answer, and again after they were lost."""

    def __init__(self, pool: str, worker_id: str, channel: grpc.aio.Channel, stub: Any) -> None:
        self._pool, self._worker_id = pool, worker_id
        self._channel = channel
        self._stub = stub
        self._session = Session(channel)
        self._serving: asyncio.Task[None] | None = None
        self._is_supported = True

    @property
    def is_open(self) -> bool:
        """Whether calls share a stream now."""
        return self._session.is_open

    @property
    def num_calls(self) -> int:
        """Those that share it."""
        return self._session.num_calls

    def decode(self, message: worker_pb2.DecodeRequest, timeout_s: float) -> Any:
        """The call, to `read` and to `cancel` as one of grpc.aio."""
        call = self._start(_DECODE, message, worker_pb2.DecodeEvent.FromString, timeout_s)
        return call or self._stub.Decode(message, timeout=timeout_s, metadata=trace_metadata())

    async def prefill(self, message: worker_pb2.PrefillRequest, timeout_s: float) -> worker_pb2.PrefillResponse:
        """The answer. Raises AioRpcError; cancelling it ends the call."""
        call = self._start(_PREFILL, message, worker_pb2.PrefillResponse.FromString, timeout_s)
        if call is None:
            plain: worker_pb2.PrefillResponse = await self._stub.Prefill(message, timeout=timeout_s, metadata=trace_metadata())
            return plain
        try:
            response: worker_pb2.PrefillResponse = await call.read()
        finally:
            call.cancel()
        if response is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            raise InternalError(f"prefill worker {self._worker_id} answered without an answer")
        return response

    def open_session(self) -> None:
        """Unless it is open, being opened, or not known to the worker. Returns at once."""
        if self._serving is None and self._is_supported:
            self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """End the session, and with it what runs on it."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})

    def _start(self, method: str, message: Message, parse: Callable[[bytes], Any], timeout_s: float) -> SessionCall | None:
        """None for a call that must go alone."""
        data = message.SerializeToString()
        if self._session.is_open and len(data) <= LARGE_BYTES:
            return self._session.start(method, data, parse, timeout_s, trace_metadata())
        reason = "unsupported" if not self._is_supported else "size" if self._session.is_open else "not_open"
        PLAIN_CALLS.labels(self._pool, reason).inc()
        self.open_session()
        return None

    async def _serve(self) -> None:
        session = self._session = Session(self._channel, on_open=SESSIONS.labels(self._pool).inc)
        try:
            await session.run()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._is_supported = False
                _log.warning(
                    "%s worker %s knows no sessions (an older version): each of its requests is a call of its own",
                    self._pool, self._worker_id,
                )  # fmt: skip
            self._tell(session, f"{error.code().name}: {error.details()}")
        except (InternalError, grpc.aio.UsageError) as error:  # the latter: the channel is closed
            self._tell(session, str(error))
        finally:
            if session.was_open:
                SESSIONS.labels(self._pool).dec()
            self._serving = None

    def _tell(self, session: Session, why: str) -> None:
        if session.was_open:
            LOST_SESSIONS.labels(self._pool).inc()
            _log.warning("the session with %s worker %s was lost: %s", self._pool, self._worker_id, why)
        else:
            _log.debug("no session with %s worker %s: %s", self._pool, self._worker_id, why)
