"""TLS, the cluster's secret and interfaces, on real processes."""

import asyncio
import shutil
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from shoal.cli.cluster_secret import new_secret
from shoal.cli.main import cli
from shoal.client import AsyncClient, Completion, Retry, Sampling, tls_credentials
from shoal.config.tls import ClusterConfig
from shoal.errors import ShoalError, Unauthenticated, Unavailable
from shoal.pb.internal.v1 import transfer_pb2, worker_pb2, worker_pb2_grpc
from shoal.rpc import ClusterLink, error_from_rpc, open_channel
from tests.certificates import Authority
from tests.e2e.secured import System, system

PROMPT = list(range(10, 60))
ONCE = Retry(attempts=1)
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")


async def ask(address: str, **client: Any) -> Completion:
    async with AsyncClient(address, retry=ONCE, **client) as connected:
        return await connected.complete(
            token_ids=PROMPT, sampling=Sampling(max_tokens=4, ignore_eos=True), visibility="speed:2", timeout_s=30
        )


async def describe(address: str, link: ClusterLink | None = None) -> ShoalError | str:
    """What a worker answers to a caller."""
    async with link.open_channel(address) if link else open_channel(address) as channel:
        stub: Any = worker_pb2_grpc.DecodeWorkerStub(channel)
        try:
            return str((await stub.Describe(worker_pb2.DescribeRequest(), timeout=5)).worker_id)
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)


async def fetch(url: str, ca: Path | None = None, headers: dict[str, str] | None = None) -> int:
    """The status of a GET; raises URLError."""
    context = ssl.create_default_context(cafile=str(ca)) if ca else None

    def get() -> int:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, headers=headers or {}), context=context, timeout=10
            ) as answer:
                return int(answer.status)
        except urllib.request.HTTPError as error:
            return error.code

    return await asyncio.to_thread(get)


async def run_cli(*arguments: object, environment: dict[str, str] | None = None) -> Result:
    return await asyncio.to_thread(CliRunner(env=environment).invoke, cli, [str(argument) for argument in arguments])


async def test_everything_listens_on_loopback_and_workers_answer_members_only(tmp_path: Path, tiny_model: Path) -> None:
    """Without any flag about interfaces, after a transfer: the router's two doors; each worker's gRPC and Gloo's one port."""
    cluster = ClusterConfig(str(new_secret(tmp_path / "secret")))
    async with system(tmp_path, tiny_model, cluster=cluster) as running:
        assert (await ask(running.grpc)).transfer.payload_bytes > 0
        listening = running.listening()
        assert [sorted(sockets.values()) for sockets in listening] == [["127.0.0.1"] * 2] * 3, listening
        doors = {int(address.rpartition(":")[2]) for address in (running.grpc, running.http)}
        assert set(listening[0]) == doors
        decode = running.workers[1]
        assert await describe(decode, ClusterLink(cluster)) == "decode-0"
        assert isinstance(await describe(decode), Unauthenticated)
        for address in running.workers:  # a pair cannot be asked for, nor KV taken or placed
            assert await _refuses_everything(address)


async def _refuses_everything(address: str) -> bool:
    """Every method of every internal service, called by a stranger."""
    methods = [
        f"/{service.full_name}/{method.name}"
        for module in (worker_pb2, transfer_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert len(methods) > 5
    refused = 0
    async with open_channel(address) as channel:
        for method in methods:
            try:
                async for _ in channel.unary_stream(method)(b"", timeout=5):
                    return False
            except grpc.aio.AioRpcError as error:  # a method of the other pool does not exist here
                if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED):
                    return False
                refused += error.code() is grpc.StatusCode.UNAUTHENTICATED
    return refused >= 3


@needs_openssl
@pytest.mark.slow
async def test_tls_everywhere(tmp_path: Path, tiny_model: Path) -> None:
    """Right and wrong authorities at both doors, members inside, new certificates while it runs."""
    authority, other = Authority(tmp_path, "doors"), Authority(tmp_path, "other")
    inner = Authority(tmp_path, "inner")
    member = inner.issue("member")
    cluster = ClusterConfig(
        str(new_secret(tmp_path / "secret")), str(member.certificate), str(member.key), str(inner.ca)
    )  # fmt: skip
    served = authority.issue("served", names="IP:127.0.0.1,DNS:localhost")
    flags: tuple[object, ...] = ("--tls-cert", served.certificate, "--tls-key", served.key)
    tokens = tmp_path / "tokens.yaml"
    token = (await run_cli("token", "acme", "--tokens-file", tokens)).stdout.strip()
    flags += ("--tokens-file", tokens)
    async with system(tmp_path, tiny_model, *flags, cluster=cluster) as running:
        await _doors(running, authority, other, token)
        member_link = ClusterLink(cluster)
        assert await describe(running.workers[1], member_link) == "decode-0"
        only_secret = ClusterLink(ClusterConfig(cluster.secret_file))
        assert isinstance(await describe(running.workers[1], only_secret), Unavailable)
        stranger = other.issue("stranger")
        forged = ClusterConfig(cluster.secret_file, str(stranger.certificate), str(stranger.key), str(inner.ca))
        assert isinstance(await describe(running.workers[1], ClusterLink(forged)), Unavailable)

        renewed = other.issue("renewed", names="IP:127.0.0.1,DNS:localhost")
        for source, target in ((renewed.certificate, served.certificate), (renewed.key, served.key)):
            source.replace(target)
        await _doors(running, other, authority, token)


async def _doors(running: System, right: Authority, wrong: Authority, token: str) -> None:
    assert (await ask(running.grpc, credentials=tls_credentials(ca=right.ca), token=token)).transfer.payload_bytes > 0
    for bad in (None, token[:-1], "shoal_" + "x" * 43):
        with pytest.raises(Unauthenticated, match="token"):
            await ask(running.grpc, credentials=tls_credentials(ca=right.ca), token=bad)
    for credentials in (tls_credentials(ca=wrong.ca), None):
        with pytest.raises(Unavailable):
            await ask(running.grpc, credentials=credentials, token=token)
    bearer = {"authorization": f"Bearer {token}"}
    assert await fetch(f"https://{running.http}/v1/models", right.ca, bearer) == 200
    assert await fetch(f"https://{running.http}/v1/models", right.ca) == 401
    for url, ca in ((f"https://{running.http}/v1/models", wrong.ca), (f"http://{running.http}/v1/models", None)):
        with pytest.raises(OSError):
            await fetch(url, ca)
    shown = await run_cli("info", "--address", running.grpc, "--tls-ca", right.ca, environment={"SHOAL_TOKEN": token})
    assert shown.exit_code == 0 and "decode-0" in shown.output, shown.output
    calling = ("-a", running.grpc, "--tls-ca", right.ca, "--token", token)
    said = await run_cli("generate", *calling, "--token-ids", "1,2,3", "-n", 2, "--ignore-eos")
    assert said.exit_code == 0, said.output
    assert (await run_cli("loads", "-a", running.grpc, "--tls-ca", wrong.ca, "--token", token)).exit_code == 3


@needs_openssl
@pytest.mark.slow
async def test_both_doors_can_require_a_certificate(tmp_path: Path, tiny_model: Path) -> None:
    authority = Authority(tmp_path)
    served, known, expired = (authority.issue(name, days=days) for name, days in (("served", 1), ("known", 1), ("expired", -1)))
    flags = ("--tls-cert", served.certificate, "--tls-key", served.key, "--tls-ca", authority.ca, "--tls-require-client-cert")
    async with system(tmp_path, tiny_model, *flags) as running:
        ours = tls_credentials(ca=authority.ca, certificate=known.certificate, key=known.key)
        assert (await ask(running.grpc, credentials=ours)).token_ids
        old = tls_credentials(ca=authority.ca, certificate=expired.certificate, key=expired.key)
        for credentials in (tls_credentials(ca=authority.ca), old):
            with pytest.raises(Unavailable):
                await ask(running.grpc, credentials=credentials)
        context = ssl.create_default_context(cafile=str(authority.ca))
        url = f"https://{running.http}/health"
        with pytest.raises(OSError):
            await asyncio.to_thread(lambda: urllib.request.urlopen(url, context=context, timeout=10).read())
        context.load_cert_chain(known.certificate, known.key)
        assert b"serving" in await asyncio.to_thread(lambda: urllib.request.urlopen(url, context=context, timeout=10).read())
