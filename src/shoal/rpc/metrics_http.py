"""Serves this process's metrics over HTTP on a named interface. Knows no metric."""

from dataclasses import dataclass, replace
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server

from shoal.errors import InvalidConfig
from shoal.metrics import REGISTRY
from shoal.rpc.address import Address


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running `/metrics` endpoint. `close` frees its port and ends its thread."""

    address: Address
    _server: WSGIServer
    _thread: Thread

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(address: Address, *, allow_wildcard: bool = False) -> MetricsServer:
    """Start serving. Raises InvalidConfig when the address means every interface unasked, or cannot be bound."""
    if address.is_wildcard and not allow_wildcard:
        raise InvalidConfig(f"metrics on {address} would listen on every interface; name one, as in 127.0.0.1:9090")
    try:
        server, thread = start_http_server(address.port, address.host, REGISTRY)
    except OSError as error:
        raise InvalidConfig(f"cannot serve metrics on {address}: {error.strerror}; choose another port") from error
    return MetricsServer(replace(address, port=server.server_port), server, thread)
