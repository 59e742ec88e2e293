"""The options of every command that calls a server: where it is, TLS, token. Knows the client; knows no command."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import click
import grpc

from shoal.client import AsyncClient, Client, Retry, tls_credentials
from shoal.rpc.channel import open_sync_channel


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to call and how."""

    address: str
    tls: bool
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    token: str | None

    def connect(self, retry: Retry = Retry()) -> Client:  # noqa: B008  (frozen)
        """A client. Raises InvalidConfig when a file cannot be used."""
        return Client(self.address, credentials=self._credentials(), token=self.token, retry=retry)

    def connect_async(self, retry: Retry = Retry()) -> AsyncClient:  # noqa: B008  (frozen)
        """A client for asyncio, to be made on the loop that uses it. Raises InvalidConfig when a file cannot be used."""
        return AsyncClient(self.address, credentials=self._credentials(), token=self.token, retry=retry)

    def open_channel(self, tls_name: str = "") -> grpc.Channel:
        """A bare channel; `tls_name` is what the certificate is to carry instead of the host. Raises InvalidConfig."""
        named = (("grpc.ssl_target_name_override", tls_name),) if tls_name else ()
        return open_sync_channel(self.address, self._credentials(), named)

    def _credentials(self) -> grpc.ChannelCredentials | None:
        if self.tls or self.tls_ca or self.tls_cert or self.tls_key:
            return tls_credentials(ca=self.tls_ca, certificate=self.tls_cert, key=self.tls_key)
        return None


_ADDRESS = click.option("--address", "-a", default="127.0.0.1:50051", show_default=True, metavar="HOST:PORT", help="The router.")
_OPTIONS = (
    click.option("--tls", is_flag=True, help="TLS, trusting this system's authorities; --tls-ca implies it."),
    click.option("--tls-ca", metavar="PEM", help="TLS, trusting servers with a certificate from this authority."),
    click.option("--tls-cert", metavar="PEM", help="Our certificate, for servers that require one."),
    click.option("--tls-key", metavar="PEM", help="The key of --tls-cert."),
    click.option("--token", envvar="SHOAL_TOKEN", metavar="TOKEN", help="Bearer token; better in SHOAL_TOKEN, unseen by `ps`."),
)


def server_options(
    command: Callable[..., Any], *, address: Callable[[Callable[..., Any]], Callable[..., Any]] = _ADDRESS
) -> Callable[..., Any]:
    """Add the options; the command gets them as one argument, `server`. `address` replaces the option of that name."""

    @functools.wraps(command)
    def with_server(**values: Any) -> Any:
        own = {field.name: values.pop(field.name) for field in fields(Server)}
        return command(server=Server(**own), **values)

    wrapped: Callable[..., Any] = with_server
    for option in reversed((address, *_OPTIONS)):
        wrapped = option(wrapped)
    return wrapped
