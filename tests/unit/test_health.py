"""Health for probes: the port of its own, `shoal health`, and over TLS."""

import asyncio
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from shoal import errors
from shoal.cli.health import health
from shoal.config.tls import ClusterConfig, TlsConfig
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import Address, ClusterLink, RpcServer, open_channel
from shoal.rpc.tls import server_credentials
from tests.certificates import Authority

LOOPBACK = Address("127.0.0.1", 0)


async def ask(*arguments: object) -> tuple[int, str]:
    """The exit code and the words of `shoal health`."""
    result = await asyncio.to_thread(CliRunner().invoke, health, [str(argument) for argument in arguments])
    return result.exit_code, result.output.strip()


async def test_health_alone_has_a_port_without_tls_and_follows(tmp_path: Path) -> None:
    door = Authority(tmp_path).issue("door")
    server = RpcServer(credentials=server_credentials(TlsConfig(str(door.certificate), str(door.key))))
    server.add(
        shoal_pb2_grpc.add_ShoalServicer_to_server, shoal_pb2_grpc.ShoalServicer(), shoal_pb2.DESCRIPTOR.services_by_name["Shoal"]
    )
    async with server:
        await server.start(LOOPBACK)
        probes = str(await server.start_health(LOOPBACK))
        assert await ask("-a", probes) == (3, f"error: {probes} is NOT_SERVING")
        assert await ask("-a", probes, "--service", "shoal.live") == (0, "SERVING")
        await server.set_serving(True)
        assert await ask("-a", probes) == (0, "SERVING")
        code, words = await ask("-a", probes, "--service", "shoal.lives")
        assert code != 0 and "knows no service 'shoal.lives'; shoal.live is known at its --health-listen" in words
        async with open_channel(probes) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await shoal_pb2_grpc.ShoalStub(channel).Abort(shoal_pb2.AbortRequest())
            assert refused.value.details() == "Method not found!"
        await server.drain()
        assert await ask("-a", probes) == (3, f"error: {probes} is NOT_SERVING")
    code, words = await ask("-a", probes, "--timeout-s", 2)
    assert code == 3 and "does not answer: UNAVAILABLE" in words


async def test_a_member_answers_over_mutual_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    member = authority.issue("member", names="DNS:shoal-cluster")
    files = (str(member.certificate), str(member.key), str(authority.ca))
    server = ClusterLink(ClusterConfig("", *files)).server()
    async with server:
        address = await server.start(LOOPBACK)
        await server.set_serving(True)
        flags = ("-a", address, "--tls-cert", files[0], "--tls-key", files[1], "--tls-ca", files[2])
        assert await ask(*flags, "--tls-name", "shoal-cluster") == (0, "SERVING")
        assert (await ask(*flags, "--timeout-s", 2))[0] == 3  # the certificate does not name the host


async def test_a_port_for_probes_must_be_named() -> None:
    server = RpcServer()
    async with server:
        await server.start(LOOPBACK)
        with pytest.raises(errors.InvalidConfig, match="every interface"):
            await server.start_health(Address("0.0.0.0", 0))
