"""Closes connections that bring no request: silent, slow, endless in their headers, or too many. Knows uvicorn; no endpoint.

accepted, or a first byte after an answer ──headers end──▶ a request, which has limits of its own ──answered──▶ idle, uvicorn's
        └──too late: 408, too long: 431, too many: 503──▶ closed, counted
"""

import asyncio
import json
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.router.http.errors import error_body
from shoal.router.instruments import HTTP_CLOSED

_log = logging.getLogger(__name__)
_LOG_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a connection may take until its request's headers have arrived."""

    max_connections: int
    header_s: float = 15.0
    max_header_bytes: int = 64 << 10


class Closings:
    """Counts what is closed, and says it in the log, now and then. Belongs to one event loop."""

    def __init__(self) -> None:
        self._num_untold, self._last = 0, ""
        self._quiet: asyncio.TimerHandle | None = None  # there while nothing is said

    def count(self, reason: str, words: str) -> None:
        """One connection, closed for a reason."""
        HTTP_CLOSED.labels(reason).inc()
        self._num_untold, self._last = self._num_untold + 1, words
        if self._quiet is None:
            self._tell()

    def _tell(self) -> None:
        self._quiet = None
        if self._num_untold:
            _log.warning("closed %d HTTP connections without a request; the last: %s", self._num_untold, self._last)
            self._num_untold = 0
            self._quiet = asyncio.get_running_loop().call_later(_LOG_EVERY_S, self._tell)


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's connection under limits."""

    def __init__(self, limits: ConnectionLimits, closings: Closings, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits, self._closings = limits, closings
        self._timer: asyncio.TimerHandle | None = None  # there while headers are awaited
        self._num_header_bytes = 0
        self._in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._close("too_many", 503, f"more than {self._limits.max_connections} connections are open; try again later")
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # what came behind that for which we hung up
        if self._timer is None and self._is_idle():
            self._await_headers()
        super().data_received(data)
        if self._timer is not None and not self._in_body:  # what is left of a body may come after its answer
            self._num_header_bytes += len(data)
            if self._num_header_bytes > self._limits.max_header_bytes:
                self._close("long_headers", 431, f"the request's headers exceed {self._limits.max_header_bytes} bytes")

    def on_message_begin(self) -> None:
        """The parser saw a request's first byte."""
        if self._timer is None:
            self._await_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser saw the last header."""
        self._end_wait()
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The parser saw a request's last byte."""
        self._in_body = False
        super().on_message_complete()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        self._num_header_bytes = 0
        self._timer = self.loop.call_later(self._limits.header_s, self._expire)

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self._is_idle():
            self._close("late_headers", 408, f"no whole request arrived within {self._limits.header_s:g} s")
        else:  # an answer is still under way, and reading paused: the next request has time until it ends
            self._await_headers()

    def _close(self, reason: str, status: int, words: str) -> None:
        self._end_wait()
        self._closings.count(reason, words)
        kind = "timeout_error" if status == 408 else "server_error" if status == 503 else "invalid_request_error"
        body = json.dumps(error_body(words, kind, None, reason)).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
