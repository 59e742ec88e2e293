"""The options of commands that give a controller orders: where it is, and how to prove membership. Knows no command."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import click

from shoal.cli.services import Service
from shoal.config.tls import ClusterConfig
from shoal.errors import InvalidConfig
from shoal.rpc import Address, ClusterLink


@dataclass(frozen=True, slots=True)
class ControllerAt:
    """Which controller."""

    address: str
    controller: str | None
    cluster_secret_file: str
    cluster_tls_cert: str
    cluster_tls_key: str
    cluster_tls_ca: str

    def find(self) -> tuple[str, ClusterLink]:
        """Its address and how to call it. Raises NotFound, InvalidConfig."""
        given = ClusterConfig(self.cluster_secret_file, self.cluster_tls_cert, self.cluster_tls_key, self.cluster_tls_ca)
        if self.controller is not None:
            return str(Address.parse(self.controller, "--controller")), ClusterLink(given)
        if given != ClusterConfig():
            raise InvalidConfig("--cluster-… says how to reach a controller that --controller names; give that, too")
        service = Service.at(self.address)
        return service.controller, ClusterLink(service.cluster)


_OPTIONS = (
    click.option(
        "--address", "-a", default="127.0.0.1:50051", show_default=True, metavar="HOST:PORT",
        help="Where the `shoal serve` of this user and machine listens.",
    ),
    click.option("--controller", metavar="HOST:PORT", help="The controller itself, wherever it runs."),
    click.option("--cluster-secret-file", default="", metavar="FILE", help="With --controller: its cluster's secret."),
    click.option("--cluster-tls-cert", default="", metavar="PEM", help="With --controller: our certificate, for mutual TLS."),
    click.option("--cluster-tls-key", default="", metavar="PEM", help="The key of --cluster-tls-cert."),
    click.option("--cluster-tls-ca", default="", metavar="PEM", help="The cluster's own CA."),
)  # fmt: skip


def controller_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command gets them as one argument, `at`."""

    @functools.wraps(command)
    def with_controller(**values: Any) -> Any:
        own = {field.name: values.pop(field.name) for field in fields(ControllerAt)}
        return command(at=ControllerAt(**own), **values)

    wrapped: Callable[..., Any] = with_controller
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped
