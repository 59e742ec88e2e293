"""Serves an ASGI app on a named interface, inside the running event loop. Knows uvicorn; knows no endpoint."""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from shoal.errors import InvalidConfig
from shoal.router.http.connection import Closings, ConnectionLimits, GuardedConnection
from shoal.rpc import Address
from shoal.rpc.open_files import raise_open_files

_CLOSE_S: Final = 0.2
_SEND_BUFFER_BYTES: Final = 128 << 10  # what a slow reader may leave with the kernel, which would let it grow to megabytes


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's own business."""
        yield


class HttpServer:
    """`start` binds and returns; `stop` lets running requests finish for a while."""

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None = None, limits: ConnectionLimits | None = None) -> None:
        """Without `limits` half of the files that this process may open are for connections: the rest is for all else."""
        limits = limits or ConnectionLimits(raise_open_files() // 2)
        connection = partial(GuardedConnection, limits, Closings())
        config = uvicorn.Config(
            app, loop="none", http=connection, ws="none", lifespan="off", log_config=None, access_log=False,  # type: ignore[arg-type]
            server_header=False, proxy_headers=False, timeout_keep_alive=75,
        )  # fmt: skip
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self.task: asyncio.Task[None] | None = None  # ends with the server, whatever ended it

    async def start(self, address: Address, *, allow_wildcard: bool = False) -> Address:
        """The address with the bound port. Raises InvalidConfig when it means every interface unasked, or cannot be bound."""
        if address.is_wildcard and not allow_wildcard:
            raise InvalidConfig(f"HTTP on {address} would listen on every interface; name one, as in 127.0.0.1:8000")
        listener = _bind(address)
        self.task = asyncio.create_task(self._server.serve(sockets=[listener]), name="serve HTTP")
        while not self._server.started:  # uvicorn offers no event
            if self.task.done():
                self.task.result()
                raise InvalidConfig(f"HTTP on {address} could not be started")
            await asyncio.sleep(0.005)
        return replace(address, port=listener.getsockname()[1])

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new connections, let running requests finish for `grace_s` seconds, then cancel them."""
        if self.task is not None:
            # idle connections need a moment to close, or uvicorn calls them overdue
            self._server.config.timeout_graceful_shutdown = max(grace_s, _CLOSE_S)  # type: ignore[assignment]  # fractions are fine
            self._server.should_exit = True
            await asyncio.wait({self.task})


def _bind(address: Address) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # connections inherit it
        try:
            listener.bind(where)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidConfig(
            f"cannot serve HTTP on {address}: {error.strerror}; choose another port (0 picks a free one)"
        ) from error
    return listener
