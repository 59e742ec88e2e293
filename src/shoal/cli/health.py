"""`shoal health`: the standard gRPC health of any Shoal process, as an exit code. Knows no service of Shoal's."""

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.cli.failure import told_in_one_line
from shoal.cli.server_options import Server, server_options
from shoal.errors import NotFound, Unavailable


@click.command()
@server_options
@click.option("--service", default="", metavar="NAME", help="Of one service, as in shoal.v1.Shoal; unless given, of the process.")
@click.option("--tls-name", default="", metavar="NAME", help="The name that its certificate carries, if not the host's.")
@click.option("--timeout-s", default=5.0, show_default=True, help="How long it may take to answer.")
def health(server: Server, service: str, tls_name: str, timeout_s: float) -> None:
    """Print SERVING and exit with 0, or say why not and exit with 3.

    Health asks for no token. A process with TLS answers over TLS, at its --health-listen without.
    """
    with told_in_one_line(), server.open_channel(tls_name) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=False
            )
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFound(
                    f"{server.address} knows no service {service!r}; shoal.live is known at its --health-listen"
                ) from None
            raise Unavailable(f"{server.address} does not answer: {_words(error)}") from None
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise Unavailable(f"{server.address} is {status}")
        click.echo(status)


def _words(error: grpc.RpcError) -> str:
    call = error if isinstance(error, grpc.Call) else None
    return f"{call.code().name}: {call.details()}" if call is not None else str(error)
