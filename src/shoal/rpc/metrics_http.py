"""Serves this process's metrics over HTTP on a named interface; to members only where the cluster has TLS. Knows no metric."""

import socket
import ssl
from dataclasses import dataclass, replace
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from shoal.config.tls import ClusterConfig
from shoal.errors import InvalidConfig
from shoal.metrics import REGISTRY
from shoal.rpc.address import Address
from shoal.rpc.tls import http_context

_IDLE_S: Final = 10.0  # a caller that says nothing for so long is hung up on


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hangs up, or is no member, is not worth a line."""


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_S

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a line."""


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


def serve_metrics(address: Address, cluster: ClusterConfig | None = None, *, allow_wildcard: bool = False) -> MetricsServer:
    """Start serving: HTTPS with the cluster's own certificate, to members of it, when its TLS is on; else plain.

    Raises InvalidConfig when the address means every interface unasked or cannot be bound, or the files cannot be used.
    """
    if address.is_wildcard and not allow_wildcard:
        raise InvalidConfig(f"metrics on {address} would listen on every interface; name one, as in 127.0.0.1:9090")
    context = None if cluster is None else http_context(cluster.tls)
    kind = _ServerV6 if ":" in address.host else _Server
    try:
        server = make_server(address.host, address.port, make_wsgi_app(REGISTRY), kind, _Handler)
    except OSError as error:
        raise InvalidConfig(f"cannot serve metrics on {address}: {error.strerror}; choose another port") from error
    if context is not None:
        server.socket = _serving_tls(server.socket, context)
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return MetricsServer(replace(address, port=server.server_port), server, thread)


def _serving_tls(listener: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Handshakes happen on each caller's own thread, so that one who delays them delays nobody."""
    return context.wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
