"""How processes of one cluster reach and admit each other: a secret with every call, mutual TLS. Knows no service."""

import hmac
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc

from shoal.config.tls import ClusterConfig
from shoal.errors import InvalidConfig, Unauthenticated
from shoal.rpc.channel import open_channel
from shoal.rpc.server import RpcServer
from shoal.rpc.status import to_status
from shoal.rpc.tls import member_credentials, server_credentials

CLUSTER_NAME: Final = "shoal-cluster"  # a DNS name that the certificate of every member carries
SECRET_HEADER: Final = "x-shoal-cluster-secret"
OPEN_SERVICES: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
_SECRET: Final = re.compile(r"[A-Za-z0-9_\-]{32,256}")


class ClusterLink:
    """Makes the servers and channels of a cluster's processes. Raises InvalidConfig when a file cannot be used."""

    def __init__(self, config: ClusterConfig | None = None) -> None:
        self._config = config or ClusterConfig()
        self._secret = read_secret(self._config.secret_file) if self._config.secret_file else None
        member_credentials(self._config.tls)  # bad files are refused now, not with the first call

    def server(self) -> RpcServer:
        """A server that answers members only; health and reflection answer everybody."""
        guards = [] if self._secret is None else [_MembersOnly(self._secret)]
        return RpcServer(interceptors=guards, credentials=server_credentials(self._config.tls))

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """An asyncio channel to a member; with TLS, to one whose certificate is the CA's and carries CLUSTER_NAME."""
        credentials = member_credentials(self._config.tls)
        named = () if credentials is None else (("grpc.ssl_target_name_override", CLUSTER_NAME),)
        channel = open_channel(address, credentials, named)
        return channel if self._secret is None else _WithSecret(channel, self._secret)


def read_secret(path: str) -> str:
    """The secret that a file holds. Raises InvalidConfig when others may read the file, or it is too short to be one."""
    file = Path(path)
    try:
        status, text = file.stat(), file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "not text"
        raise InvalidConfig(f"cannot read the cluster's secret from {path}: {words}; every node needs the same file") from None
    if is_open_to_others(status.st_mode, status.st_uid, os.geteuid()):
        raise InvalidConfig(f"{path} holds the cluster's secret and others may read it; run `chmod 600 {path}`")
    if _SECRET.fullmatch(text) is None:
        raise InvalidConfig(f"{path} must hold 32 to 256 letters, digits, - or _, as `openssl rand -hex 32` writes them")
    return text


def is_open_to_others(mode: int, owner: int, reader: int) -> bool:
    """Whether others than its reader may read a file. One of root's may be its reader's by the group: so are secrets mounted."""
    return bool(mode & (0o037 if owner == 0 != reader else 0o077))


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Looks at what a call brings in one header before its message is parsed. Health and reflection answer everybody."""

    header: str

    def admit(self, handler: Any, brought: list[Any]) -> Any:
        """The handler for a call that brought these values, perhaps one that refuses."""
        raise NotImplementedError

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_SERVICES):
            return handler
        metadata: Any = handler_call_details.invocation_metadata or ()
        return self.admit(handler, [value for name, value in metadata if name == self.header])


class _MembersOnly(Guard):
    """Refuses every call that does not bring the secret."""

    header = SECRET_HEADER

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def admit(self, handler: Any, brought: list[Any]) -> Any:
        given = brought[0] if len(brought) == 1 else ""
        if hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._secret):
            return handler
        return refuse(
            handler, "this port is for members of the cluster: the call brings no valid cluster secret (--cluster-secret-file)"
        )


def refuse(handler: Any, words: str) -> Any:
    """A handler of the same kind that ends UNAUTHENTICATED and never looks at the message."""

    async def once(request: Any, context: Any) -> Any:
        await context.abort(to_status(Unauthenticated()), words)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(to_status(Unauthenticated()), words)
        yield  # makes it a stream

    kinds = {"unary_unary": once, "stream_unary": once, "unary_stream": stream, "stream_stream": stream}
    kind = next(name for name in kinds if getattr(handler, name) is not None)
    return handler._replace(request_deserializer=None, **{kind: kinds[kind]})


class _WithSecret(grpc.aio.Channel):
    """A channel whose calls carry the secret; they are the inner channel's own, so messages pass no interceptor."""

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        self._channel = channel
        self._extra = ((SECRET_HEADER, secret),)

    async def __aenter__(self) -> "_WithSecret":
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._carrying(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._carrying(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._carrying(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._carrying(self._channel.stream_stream(*arguments, **options))

    def _carrying(self, method: Any) -> Any:
        def call(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
            return method(*arguments, metadata=(*(metadata or ()), *self._extra), **options)

        return call
