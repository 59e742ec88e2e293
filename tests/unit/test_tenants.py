import hashlib
import os
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.cli.main import cli
from shoal.client import AsyncClient, Retry
from shoal.config.tokens import TokenEntry, hash_token, new_token, read_tokens
from shoal.errors import CapacityExceeded, InvalidConfig, Unauthenticated
from shoal.pb.v1 import shoal_pb2
from shoal.router import instruments, tenants
from shoal.router.tenants import Tenant, TokenBook
from tests.fakes.cluster import Cluster, request
from tests.fakes.workers import until

HTTP_BODY = {"model": "smollm2-135m", "prompt": [10, 11, 12], "max_tokens": 2}


def write(path: Path, *entries: TokenEntry) -> Path:
    path.write_text("".join(entry.to_yaml() for entry in entries))
    return path


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_limits_of_a_tenant() -> None:
    clock = Clock()
    tenant = Tenant(TokenEntry("a", "0" * 64, max_concurrent=2, requests_per_minute=3), clock)
    with tenant.running(), tenant.running():
        with pytest.raises(CapacityExceeded, match="limit of 2 requests running") as refused, tenant.running():
            pass
        assert refused.value.retry_after_s == 1.0
        clock.now += 20
    with tenant.running():
        pass
    with pytest.raises(CapacityExceeded, match="retry in 40 s") as refused, tenant.running():
        pass
    assert refused.value.retry_after_s == 40.0 and tenant.num_running == 0
    clock.now += 40  # the first two have left the window; what was refused never counted
    for _ in range(2):
        with tenant.running():
            pass
    with pytest.raises(CapacityExceeded, match="retry in 20 s"), tenant.running():
        pass


def test_a_request_that_fails_frees_its_place() -> None:
    tenant = Tenant(TokenEntry("a", "0" * 64, max_concurrent=1))
    for _ in range(3):
        with pytest.raises(ValueError), tenant.running():
            raise ValueError
    assert tenant.num_running == 0


def test_every_entry_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [new_token() for _ in range(4)]
    book = TokenBook(str(write(tmp_path / "t", *(TokenEntry(f"t{i}", hash_token(t)) for i, t in enumerate(tokens)))))
    compared = []
    real = tenants.hmac.compare_digest
    monkeypatch.setattr(tenants.hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    assert book.authenticate(f"Bearer {tokens[0]}").entry.tenant == "t0"
    assert book.authenticate(f"bearer  {tokens[3]}").entry.tenant == "t3"
    assert len(compared) == 8
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer ",
        tokens[0],
        f"Basic {tokens[0]}",
        f"Bearer {tokens[0]}x",
        "Bearer " + "x" * 100_000,
    ):
        with pytest.raises(Unauthenticated):
            book.authenticate(wrong)


def test_a_changed_file_is_taken_and_a_broken_one_is_not(tmp_path: Path) -> None:
    clock, (old, new) = Clock(), (new_token(), new_token())
    path = write(tmp_path / "tokens", TokenEntry("a", hash_token(old), max_concurrent=1))
    book = TokenBook(str(path), clock)
    with book.authenticate(f"Bearer {old}").running():
        write(tmp_path / "next", TokenEntry("a", hash_token(new), max_concurrent=1))
        os.replace(tmp_path / "next", path)
        assert book.authenticate(f"Bearer {old}")  # looked at a moment ago
        clock.now += 1.1
        with pytest.raises(Unauthenticated):
            book.authenticate(f"Bearer {old}")
        with pytest.raises(CapacityExceeded), book.authenticate(f"Bearer {new}").running():  # what runs still counts
            pass
    path.write_text("- tenant: [")
    clock.now += 1.1
    assert book.authenticate(f"Bearer {new}")
    path.unlink()
    clock.now += 1.1
    assert book.authenticate(f"Bearer {new}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one entry"),
        ("a: 1", "at least one entry"),
        ("- [", "is not YAML"),
        ("- x", "entry 1 must be a mapping"),
        ("- {tenant: a}", "lacks sha256"),
        ("- {tenant: a, sha256: 'x', tok: 1}", "unknown keys tok"),
        ("- {tenant: a, sha256: abc}", "64 lower-case hex digits"),
        ("- {tenant: 'a b', sha256: abc}", "tenant must be"),
        (f"- {{tenant: a, sha256: '{'0' * 64}', max_concurrent: -1}}", "max_concurrent must be a whole number"),
        (f"- {{tenant: a, sha256: '{'0' * 64}'}}\n- {{tenant: b, sha256: '{'0' * 64}'}}", "same token stands there twice"),
        (f"- {{tenant: a, sha256: '{'0' * 64}'}}\n- {{tenant: a, sha256: '{'1' * 64}', max_concurrent: 1}}", "different limits"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(InvalidConfig, match=words):
        read_tokens(tmp_path / "t")


def test_the_command_makes_tokens_and_keeps_only_hashes(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    made = []
    for limits in ([], [], ["--max-concurrent", "3", "--requests-per-minute", "9"]):
        name = "acme" if not limits else "other"
        result = CliRunner().invoke(cli, ["token", name, "-f", str(path), *limits])
        assert result.exit_code == 0, result.output
        made.append(result.stdout.strip())
    assert len(set(made)) == 3 and all(len(token) > 40 and token not in path.read_text() for token in made)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.sha256 for entry in read_tokens(path)] == [hashlib.sha256(token.encode()).hexdigest() for token in made]
    assert read_tokens(path)[2] == TokenEntry("other", hash_token(made[2]), 3, 9)
    before = path.read_text()
    refused = CliRunner().invoke(cli, ["token", "other", "-f", str(path), "--max-concurrent", "1"])
    assert refused.exit_code == 2 and "different limits" in refused.output and path.read_text() == before
    assert CliRunner().invoke(cli, ["token", "a b"]).exit_code == 2
    shown = CliRunner().invoke(cli, ["token", "acme"])
    assert shown.exit_code == 0 and hash_token(shown.stdout.strip()) in shown.stderr


def counted(metric: Any) -> float:
    return float(metric._value.get())


async def test_both_doors_ask_for_a_token(tmp_path: Path) -> None:
    import httpx2 as httpx

    good, slow = new_token(), new_token()
    path = write(
        tmp_path / "t", TokenEntry("good", hash_token(good)), TokenEntry("slow", hash_token(slow), requests_per_minute=2)
    )
    async with Cluster(tokens_file=str(path)) as c, httpx.AsyncClient(base_url=c.http) as web:
        bearer, refused_before = {"authorization": f"Bearer {good}"}, counted(instruments.UNAUTHENTICATED.labels("grpc"))
        assert (await c.complete(request(max_tokens=2), metadata=tuple(bearer.items()))).completion_tokens == 2
        for metadata in ((), (("authorization", "Bearer x"),), (("authorization", f"Bearer {good}"),) * 2):
            code, words = await c.status(request(max_tokens=2), metadata=metadata)
            assert code is grpc.StatusCode.UNAUTHENTICATED and "token" in words and good not in words
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await c.stub.GetLoads(shoal_pb2.GetLoadsRequest())
        assert counted(instruments.UNAUTHENTICATED.labels("grpc")) == refused_before + 4
        health = health_pb2_grpc.HealthStub(c.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING

        assert (await web.post("/v1/completions", json=HTTP_BODY, headers=bearer)).status_code == 200
        assert (await web.get("/health")).status_code == 200
        for method, url in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nowhere")):
            for headers in ({}, {"authorization": "Bearer x"}):
                answer = await web.request(method, url, headers=headers, content=b"{")
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", (url, answer.text)
                assert answer.json()["error"]["code"] == "invalid_api_key" and "x-request-id" in answer.headers

        async with AsyncClient(c.address, token=slow, retry=Retry(attempts=1)) as client:
            await client.complete(token_ids=[1, 2, 3], timeout_s=10)
            limited = {"authorization": f"Bearer {slow}"}
            assert (await web.post("/v1/completions", json=HTTP_BODY, headers=limited)).status_code == 200  # one limit, two doors
            with pytest.raises(CapacityExceeded, match="2 requests a minute") as refused:
                await client.complete(token_ids=[1, 2, 3], timeout_s=10)
            assert refused.value.retry_after_s is not None and 1 <= refused.value.retry_after_s <= 60
            await client.loads()  # only requests are counted
            answer = await web.post("/v1/completions", json=HTTP_BODY, headers=limited)
            assert counted(instruments.LIMITED.labels("slow", "requests_per_minute")) == 2
            assert counted(instruments.TENANT_REQUESTS.labels("slow")) == 2
            assert answer.status_code == 429 and 1 <= int(answer.headers["retry-after"]) <= 60


async def test_a_batch_counts_each_prompt_and_tenants_cannot_abort_each_other(tmp_path: Path) -> None:
    import asyncio

    import httpx2 as httpx

    one, two = new_token(), new_token()
    path = write(tmp_path / "t", TokenEntry("one", hash_token(one), requests_per_minute=2), TokenEntry("two", hash_token(two)))
    async with Cluster(tokens_file=str(path)) as c, httpx.AsyncClient(base_url=c.http) as web:
        batch = HTTP_BODY | {"prompt": [[10, 11]] * 3}
        answer = await web.post("/v1/completions", json=batch, headers={"authorization": f"Bearer {one}"})
        assert answer.status_code == 429

        ours, theirs = ((("authorization", f"Bearer {token}"),) for token in (two, one))
        running = asyncio.create_task(c.replies(request(max_tokens=400, request_id="same"), metadata=ours))
        await until(lambda: bool(c.router.service._running))
        abort = shoal_pb2.AbortRequest(request_ids=["same"])
        assert (await c.stub.Abort(abort, metadata=theirs)).num_aborted == 0
        assert (await c.stub.Abort(abort, metadata=ours)).num_aborted == 1
        await running
