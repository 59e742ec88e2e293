import asyncio
import os
import shutil
import socket
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.client import tls_credentials
from shoal.config.serve import ServeConfig
from shoal.config.tls import ClusterConfig, TlsConfig
from shoal.config.worker import Pool
from shoal.errors import InvalidConfig
from shoal.pb.internal.v1 import worker_pb2, worker_pb2_grpc
from shoal.router.http import HttpServer
from shoal.rpc import Address, ClusterLink, RpcServer, open_channel, serve_metrics
from shoal.rpc.tls import PemFiles, http_context, server_credentials
from tests.certificates import Authority, Issued

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
SERVICE = worker_pb2.DESCRIPTOR.services_by_name["DecodeWorker"]


class Servicer(worker_pb2_grpc.DecodeWorkerServicer):
    """Answers one call of each kind."""

    async def Describe(self, request: Any, context: Any) -> worker_pb2.WorkerDescription:
        return worker_pb2.WorkerDescription(worker_id="w")

    async def Decode(self, request: Any, context: Any) -> Any:
        yield worker_pb2.DecodeEvent()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def secret_file(folder: Path, text: str = "s" * 40, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def member(authority: Authority, issued: Issued, secret: str = "") -> ClusterConfig:
    return ClusterConfig(secret, str(issued.certificate), str(issued.key), str(authority.ca))


async def started(server: RpcServer) -> str:
    server.add(worker_pb2_grpc.add_DecodeWorkerServicer_to_server, Servicer(), SERVICE)
    return str(await server.start(Address("127.0.0.1", 0)))


async def outcome(channel: grpc.aio.Channel) -> str:
    """Both kinds of call must end alike: OK, or the name of a status."""
    stub: Any = worker_pb2_grpc.DecodeWorkerStub(channel)
    found = []
    async with channel:
        for use in (lambda: stub.Describe(worker_pb2.DescribeRequest(), timeout=5), lambda: _drain(stub)):
            try:
                await use()
                found.append("OK")
            except grpc.aio.AioRpcError as error:
                found.append(error.code().name)
    assert found[0] == found[1], found
    return found[0]


async def _drain(stub: Any) -> None:
    assert [event async for event in stub.Decode(worker_pb2.DecodeRequest(), timeout=5)]


async def test_only_members_call_a_port_with_a_secret(tmp_path: Path) -> None:
    link = ClusterLink(ClusterConfig(secret_file(tmp_path)))
    (tmp_path / "other").mkdir()
    stranger = ClusterLink(ClusterConfig(secret_file(tmp_path / "other", "t" * 40)))
    async with link.server() as server:
        address = await started(server)
        assert await outcome(link.open_channel(address)) == "OK"
        assert await outcome(stranger.open_channel(address)) == "UNAUTHENTICATED"
        assert await outcome(open_channel(address)) == "UNAUTHENTICATED"
        async with open_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=5)  # open to everybody
            raw = channel.unary_unary("/shoal.internal.v1.DecodeWorker/Describe")
            with pytest.raises(grpc.aio.AioRpcError, match="brings no valid cluster secret"):
                await raw(b"\xff no message", timeout=5)  # refused before anybody tries to read it
            twice = (("x-shoal-cluster-secret", "s" * 40),) * 2
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await raw(b"", metadata=twice, timeout=5)


async def test_members_prove_themselves_by_certificate(authority: Authority, tmp_path: Path) -> None:
    link = ClusterLink(member(authority, authority.issue("member"), secret_file(tmp_path)))
    other = Authority(tmp_path, "other-ca")
    async with link.server() as server:
        address = await started(server)
        assert await outcome(link.open_channel(address)) == "OK"
        assert await outcome(open_channel(address)) == "UNAVAILABLE"  # no TLS at all
        assert await outcome(open_channel(address, tls_credentials(ca=authority.ca))) == "UNAVAILABLE"  # no certificate
        of_other = other.issue("intruder")
        assert await outcome(ClusterLink(member(other, of_other)).open_channel(address)) == "UNAVAILABLE"
        forged = tls_credentials(ca=authority.ca, certificate=of_other.certificate, key=of_other.key)
        assert await outcome(open_channel(address, forged)) == "UNAVAILABLE"  # knows our CA, is signed by another
        old = authority.issue("old", days=-1)
        assert await outcome(ClusterLink(member(authority, old)).open_channel(address)) == "UNAVAILABLE"  # expired


async def test_a_server_that_is_no_member_is_not_called(authority: Authority) -> None:
    """The CA's signature is not enough: the certificate must carry the cluster's name."""
    web = authority.issue("web", names="DNS:example.com,IP:127.0.0.1")
    caller = ClusterLink(member(authority, authority.issue("caller")))
    async with ClusterLink(member(authority, web)).server() as server:
        assert await outcome(caller.open_channel(await started(server))) == "UNAVAILABLE"


async def test_a_running_server_takes_new_files_and_survives_bad_ones(authority: Authority, tmp_path: Path) -> None:
    served = Issued(tmp_path / "server.pem", tmp_path / "server.key")
    other = Authority(tmp_path, "other-ca")

    def install(issued: Issued) -> None:
        for source, target in ((issued.certificate, served.certificate), (issued.key, served.key)):
            shutil.copy(source, target.with_suffix(".new"))
            os.replace(target.with_suffix(".new"), target)

    install(authority.issue("first"))
    tls = TlsConfig(str(served.certificate), str(served.key))
    by_first, by_second = (tls_credentials(ca=ca) for ca in (authority.ca, other.ca))
    async with RpcServer(credentials=server_credentials(tls)) as server:
        address = await started(server)
        assert await outcome(open_channel(address, by_first)) == "OK"
        assert await outcome(open_channel(address, by_second)) == "UNAVAILABLE"
        async with open_channel(address, by_first) as lasting:
            stub: Any = worker_pb2_grpc.DecodeWorkerStub(lasting)
            await stub.Describe(worker_pb2.DescribeRequest(), timeout=5)
            install(other.issue("second"))
            assert await outcome(open_channel(address, by_second)) == "OK"
            assert await outcome(open_channel(address, by_first)) == "UNAVAILABLE"
            await stub.Describe(worker_pb2.DescribeRequest(), timeout=5)  # an open connection goes on
        served.certificate.write_text("half a certif")
        assert await outcome(open_channel(address, by_second)) == "OK"  # the last good ones
        served.key.unlink()
        assert await outcome(open_channel(address, by_second)) == "OK"
        install(authority.issue("third"))
        assert await outcome(open_channel(address, by_first)) == "OK"


async def test_an_expired_server_is_not_trusted(authority: Authority) -> None:
    old = authority.issue("old-server", days=-1)
    async with RpcServer(credentials=server_credentials(TlsConfig(str(old.certificate), str(old.key)))) as server:
        assert await outcome(open_channel(await started(server), tls_credentials(ca=authority.ca))) == "UNAVAILABLE"


def test_half_a_configuration_is_refused(authority: Authority, tmp_path: Path) -> None:
    one, two = authority.issue("one"), authority.issue("two")
    for wrong, words in (
        ({"tls_cert": "c"}, "tls_cert.*certificate is given, key is missing"),
        ({"tls_key": "k"}, "key is given, certificate is missing"),
        ({"tls_cert": "c", "tls_key": "k", "tls_require_client_cert": True}, "needs the CA"),
        ({"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}, "no effect at a server"),
        ({"tls_ca": "a", "tls_require_client_cert": True}, "turns no TLS on"),
        ({"cluster_tls_cert": "c", "cluster_tls_key": "k"}, "cluster_tls_cert.*missing: ca"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            ServeConfig(**wrong)  # type: ignore[arg-type]
    for tls, words in (
        (TlsConfig(str(one.certificate), str(two.key)), "no certificate and its unencrypted key"),
        (TlsConfig(str(one.certificate), str(tmp_path / "none")), "cannot read"),
        (TlsConfig(str(one.key), str(one.key)), "no certificate and its unencrypted key"),
        (TlsConfig(str(one.certificate), str(one.key), str(one.key), True), "holds no certificates"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            PemFiles(tls)


def test_a_secret_is_kept_secret(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="chmod 600"):
        ClusterLink(ClusterConfig(secret_file(tmp_path, mode=0o640)))
    with pytest.raises(InvalidConfig, match="32 to 256"):
        ClusterLink(ClusterConfig(secret_file(tmp_path, "short")))
    with pytest.raises(InvalidConfig, match="every node needs the same file"):
        ClusterLink(ClusterConfig(str(tmp_path / "none")))
    path = secret_file(tmp_path)
    worker = ServeConfig(cluster_secret_file=path).worker(Pool.DECODE)
    assert worker.cluster.secret_file == path and "s" * 40 not in str(worker.to_dict())
    assert type(worker).from_dict(worker.to_dict()) == worker


async def test_a_refused_stream_of_requests_ends(tmp_path: Path) -> None:
    """Streams of requests (the control stream of a pair) are refused as well."""
    from shoal.pb.internal.v1 import transfer_pb2, transfer_pb2_grpc

    link = ClusterLink(ClusterConfig(secret_file(tmp_path)))

    class Transfer(transfer_pb2_grpc.TransferServicer):
        async def Control(self, request_iterator: Any, context: Any) -> Any:
            async for _ in request_iterator:
                yield transfer_pb2.ReceiverMessage()

    async with link.server() as server:
        server.add(
            transfer_pb2_grpc.add_TransferServicer_to_server, Transfer(), transfer_pb2.DESCRIPTOR.services_by_name["Transfer"]
        )
        address = str(await server.start(Address("127.0.0.1", 0)))
        for channel, expected in ((link.open_channel(address), "message"), (open_channel(address), "UNAUTHENTICATED")):
            async with channel:
                call = transfer_pb2_grpc.TransferStub(channel).Control()
                try:
                    async with asyncio.timeout(5):
                        await call.write(transfer_pb2.SenderMessage())
                        answer = "message" if isinstance(await call.read(), transfer_pb2.ReceiverMessage) else "end"
                except grpc.aio.AioRpcError:  # a write that comes after the refusal says INTERNAL; the call knows better
                    answer = (await call.code()).name
                assert answer == expected


async def test_a_new_authority_for_clients_is_taken_while_the_server_runs(authority: Authority, tmp_path: Path) -> None:
    """At a gRPC and at an HTTP server: first both are trusted, then the new one only."""
    other = Authority(tmp_path, "other-ca")
    served, old, new = authority.issue("for-clients"), authority.issue("old-client"), other.issue("new-client")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.ca.read_bytes())
    tls = TlsConfig(str(served.certificate), str(served.key), str(trusted), require_client_certificate=True)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def may_call(address: str, url: str, client: Issued) -> bool:
        ours = tls_credentials(ca=authority.ca, certificate=client.certificate, key=client.key)
        over_grpc = await outcome(open_channel(address, ours)) == "OK"
        context = ssl.create_default_context(cafile=str(authority.ca))
        context.load_cert_chain(client.certificate, client.key)
        try:
            over_http = await asyncio.to_thread(lambda: urllib.request.urlopen(url, context=context, timeout=5).status) == 204
        except OSError:
            over_http = False
        assert over_grpc == over_http
        return over_grpc

    web = HttpServer(app, http_context(tls))
    url = f"https://{await web.start(Address('127.0.0.1', 0))}/"
    async with RpcServer(credentials=server_credentials(tls)) as server:
        address = await started(server)
        assert [await may_call(address, url, client) for client in (old, new)] == [True, False]
        trusted.write_bytes(authority.ca.read_bytes() + other.ca.read_bytes())
        assert [await may_call(address, url, client) for client in (old, new)] == [True, True]
        trusted.write_bytes(other.ca.read_bytes())
        assert [await may_call(address, url, client) for client in (old, new)] == [False, True]
    await web.stop()


def test_metrics_are_for_members_where_the_cluster_has_tls(authority: Authority, tmp_path: Path) -> None:
    mine, stranger = authority.issue("metrics"), Authority(tmp_path, "other").issue("stranger")
    server = serve_metrics(Address("127.0.0.1", 0), member(authority, mine))

    def scrape(scheme: str = "https", identity: Issued | None = None) -> bytes:
        context = ssl.create_default_context(cafile=str(authority.ca))
        if identity is not None:
            context.load_cert_chain(identity.certificate, identity.key)
        tls = context if scheme == "https" else None
        with urllib.request.urlopen(f"{scheme}://{server.address}/metrics", context=tls, timeout=5) as answer:
            return bytes(answer.read())

    silent = socket.create_connection(("127.0.0.1", server.address.port))  # says nothing and delays nobody
    assert b"shoal_build_info" in scrape(identity=mine)
    for scheme, identity in (("https", None), ("https", stranger), ("http", None)):
        with pytest.raises(OSError):
            scrape(scheme, identity)
    assert b"shoal_build_info" in scrape(identity=mine), "and it serves on"
    silent.close()
    server.close()
