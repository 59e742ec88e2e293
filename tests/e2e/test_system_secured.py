"""`shoal serve` with everything on: TLS at the doors and inside, tokens, and the secret that it makes by itself."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from click.testing import CliRunner

from shoal.cli.main import cli
from shoal.client import Client, Retry, Sampling, tls_credentials
from shoal.errors import Unauthenticated, Unavailable
from shoal.pb.internal.v1 import worker_pb2, worker_pb2_grpc
from shoal.rpc import error_from_rpc, open_sync_channel
from tests.certificates import Authority
from tests.e2e.conftest import Cluster
from tests.e2e.secured import listening

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl"),
]


def test_serve_with_everything_on(serve: Callable[..., Cluster], tiny_model: Path, tmp_path: Path) -> None:
    doors, inner = Authority(tmp_path, "doors"), Authority(tmp_path, "inner")
    served, member = doors.issue("served", names="IP:127.0.0.1"), inner.issue("member")
    token = CliRunner().invoke(cli, ["token", "acme", "-f", str(tmp_path / "tokens")]).stdout.strip()
    cluster = serve(
        "--model", str(tiny_model), "--grace-s", "2", "--tokens-file", str(tmp_path / "tokens"), "--transfer-backend", "gloo",
        "--tls-cert", str(served.certificate), "--tls-key", str(served.key),
        "--cluster-tls-cert", str(member.certificate), "--cluster-tls-key", str(member.key), "--cluster-tls-ca", str(inner.ca),
    )  # fmt: skip
    outside, inside = tls_credentials(ca=doors.ca), tls_credentials(ca=inner.ca, certificate=member.certificate, key=member.key)
    with Client(cluster.address, credentials=outside, token=token) as client:
        done = client.complete(token_ids=list(range(10, 60)), sampling=Sampling(max_tokens=4, ignore_eos=True), timeout_s=30)
        assert len(done.token_ids) == 4 and done.transfer.payload_bytes > 0
        workers = client.server_info().workers
    with Client(cluster.address, credentials=outside, retry=Retry(attempts=1)) as client, pytest.raises(Unauthenticated):
        client.loads()

    secret_file = _flag(cluster.child("shoal.router"), "--cluster-secret-file")
    assert secret_file.stat().st_mode & 0o777 == 0o600 and secret_file.parent.stat().st_mode & 0o777 == 0o700
    secret = secret_file.read_text().strip()
    for process in cluster.descendants():
        assert secret not in " ".join(process.cmdline()) and secret not in " ".join(process.environ().values())
    _check_what_listens(cluster, [worker.address for worker in workers])
    assert secret not in cluster.log.read_text() and token not in cluster.log.read_text()

    named = (("grpc.ssl_target_name_override", "shoal-cluster"),)
    for worker in workers:
        with grpc.secure_channel(worker.address, inside, named) as channel:  # a member's certificate, but not the secret
            assert isinstance(_describe(channel), Unauthenticated)
        with open_sync_channel(worker.address) as channel:
            assert isinstance(_describe(channel), Unavailable)
    cluster.stop()
    assert not secret_file.parent.exists()


def _check_what_listens(cluster: Cluster, workers: list[str]) -> None:
    """As docs/security.md lists it: our sockets, each on loopback; the others are Ray's own."""
    router, controller = cluster.child("shoal.router"), cluster.child("shoal.launch.controller")
    assert set(listening(router).values()) == {"127.0.0.1"} and len(listening(router)) == 1, "the one door that was asked for"
    ours = {port: host for port, host in listening(controller).items() if host == "127.0.0.1"}
    assert ours, "the controller's gRPC"
    for address in workers:
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"
        process = next(p for p in cluster.descendants() if int(port) in listening(p))
        local = [where for where in listening(process).values() if where == "127.0.0.1"]
        assert len(local) >= 2, "gRPC and Gloo"
    for process in cluster.descendants():
        elsewhere = {port: host for port, host in listening(process).items() if host != "127.0.0.1"}
        assert not elsewhere or "ray" in " ".join(process.cmdline()).lower(), (process.cmdline(), elsewhere)


def _flag(process: psutil.Process, name: str) -> Path:
    arguments = process.cmdline()
    return Path(arguments[arguments.index(name) + 1])


def _describe(channel: grpc.Channel) -> object:
    stub: Any = worker_pb2_grpc.DecodeWorkerStub(channel)
    for method in (stub.Describe, worker_pb2_grpc.PrefillWorkerStub(channel).Describe):
        try:
            return method(worker_pb2.DescribeRequest(), timeout=5)
        except grpc.RpcError as error:
            found: Any = error
            if found.code() is not grpc.StatusCode.UNIMPLEMENTED:
                return error_from_rpc(error)
    return None
