"""The one way a Shoal process serves gRPC: bound to a named interface, with health, reflection and translated errors.

Knows no service of its own; services are added by the room that implements them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shoal.errors import InvalidConfig
from shoal.pb.internal.v1 import session_pb2, session_pb2_grpc
from shoal.rpc.address import Address
from shoal.rpc.channel import MAX_MESSAGE_BYTES
from shoal.rpc.guards import guarded
from shoal.rpc.session_server import SessionServicer

LIVE: Final = "shoal.live"  # a name for health checks alone: no service

SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be noticed, not shared
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class RpcServer:
    """An aio gRPC server. Create, `add` services, `start`; health is NOT_SERVING until `set_serving(True)`."""

    def __init__(
        self,
        *,
        interceptors: "Sequence[grpc.aio.ServerInterceptor[Any, Any]]" = (),
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.grpc = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._credentials = credentials
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # chosen at run time
        self._services: list[str] = []
        self._methods: dict[str, Any] = {}  # handlers by path
        self._sessions: SessionServicer | None = None
        self._stopping = False
        self._probes: grpc.aio.Server | None = None

    def add(self, register: Callable[[Any, Any], None], servicer: object, service: ServiceDescriptor) -> None:
        """Mount a service, as in `add(add_XServicer_to_server, servicer, x_pb2.DESCRIPTOR.services_by_name["X"])`."""
        register(servicer, _Recorder(self.grpc, self._methods))
        self._services.append(service.full_name)

    def add_sessions(self) -> None:
        """Let callers share one stream for many calls of the services that were added (session_server.py)."""
        self._sessions = SessionServicer(dict(self._methods))
        service = session_pb2.DESCRIPTOR.services_by_name["Sessions"]
        self.add(session_pb2_grpc.add_SessionsServicer_to_server, self._sessions, service)

    async def start_health(self, address: Address, *, allow_wildcard: bool = False) -> Address:
        """The same health on a port of its own that has nothing else and never TLS: probes of orchestrators speak none.

        It also answers for LIVE, which is SERVING as long as the process moves, whatever it waits for, until it drains.
        Call after `start`; it ends with it. Returns the bound address. Raises InvalidConfig as `start` does.
        """
        self._probes = grpc.aio.server(options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
        bound = _bind(self._probes, address, None, allow_wildcard)
        await self._probes.start()
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        return bound

    async def start(self, address: Address, *, allow_wildcard: bool = False) -> Address:
        """Bind, start and return the address with the bound port.

        Raises InvalidConfig when the address means every interface and that was not asked for, or cannot be bound.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, _Recorder(self.grpc, {}))
        reflection.enable_server_reflection(
            (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME),
            self.grpc,
        )
        for service in ("", *self._services):
            await self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        bound = _bind(self.grpc, address, self._credentials, allow_wildcard)
        await self.grpc.start()
        return bound

    async def set_serving(self, serving: bool, *services: str) -> None:
        """Publish health of the named services, or of "" and every service. Without effect once stopping."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in services or ("", *self._services):
            await self._health.set(service, status)

    async def drain(self) -> None:
        """Say NOT_SERVING for good; calls go on. The first thing to do on SIGTERM."""
        if not self._stopping:
            self._stopping = True
            await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drain, refuse new calls, let running ones finish for `grace_s` seconds, then cancel them."""
        await self.drain()
        if self._sessions is not None:
            self._sessions.drain()
        await self.grpc.stop(grace_s)
        if self._probes is not None:
            await self._probes.stop(0.0)

    async def wait_for_termination(self) -> None:
        await self.grpc.wait_for_termination()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.shield(self.stop())


class _Recorder:
    """Stands for the server while a service is mounted: guards its methods, and notes them."""

    def __init__(self, server: grpc.aio.Server, methods: dict[str, Any]) -> None:
        self._server: Any = server
        self._methods = methods

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        own = {name: guarded(handler, f"/{service}/{name}") for name, handler in handlers.items()}
        self._methods |= {f"/{service}/{name}": handler for name, handler in own.items()}
        self._server.add_registered_method_handlers(service, own)


def _bind(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None, allow_wildcard: bool) -> Address:
    """Give a server its port; the address as bound. Raises InvalidConfig."""
    if address.is_wildcard and not allow_wildcard:
        raise InvalidConfig(
            f"{address} would listen on every interface; name one (127.0.0.1 for this machine only), or ask for all of them"
        )
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise InvalidConfig(
            f"cannot listen on {address}: the port is in use or the host is not this machine's; "
            "choose another port (0 picks a free one) or stop what holds it"
        )
    return replace(address, port=port)
