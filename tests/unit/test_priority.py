"""A request's class: through both doors to both workers, and no higher than its tenant may go."""

from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from shoal.client import AsyncClient
from shoal.config.tokens import TokenEntry, hash_token, new_token, read_tokens
from shoal.errors import InvalidConfig, InvalidRequest
from shoal.router import instruments
from shoal.types import Priority, Turn
from tests.fakes.cluster import Cluster, request

BODY = {"model": "smollm2-135m", "prompt": [10, 11, 12], "max_tokens": 2}
OVER_HTTP: list[tuple[dict[str, Any], str]] = [
    ({}, "normal"),
    ({"priority": "high"}, "high"),
    ({"priority": -3}, "high"),
    ({"priority": 0, "service_tier": "flex"}, "normal"),
    ({"priority": 1}, "low"),
    ({"service_tier": "flex"}, "low"),
    ({"service_tier": "priority"}, "high"),
    ({"service_tier": "auto"}, "normal"),
]


async def test_a_priority_reaches_both_workers_through_both_doors() -> None:
    async with Cluster() as c, httpx.AsyncClient(base_url=c.http) as web, AsyncClient(c.address) as client:
        for priority in ("low", "normal", "high"):
            await c.complete(request(max_tokens=2, priority=priority))
            assert c.decode[0].seen[-1].priority == c.prefill[0].seen[-1].priority == priority
            await client.complete(token_ids=[5, 6, 7], priority=priority)
            assert c.decode[0].seen[-1].priority == priority
        await c.complete(request(max_tokens=2))
        assert (c.decode[0].seen[-1].priority, c.decode[0].seen[-1].tenant) == ("normal", "")
        assert await c.status(request(max_tokens=2, priority="urgent")) == (
            grpc.StatusCode.INVALID_ARGUMENT, "priority must be low, normal, high, not 'urgent'",
        )  # fmt: skip
        for fields, priority in OVER_HTTP:
            assert (await web.post("/v1/completions", json=BODY | fields)).status_code == 200
            assert c.decode[0].seen[-1].priority == priority, fields
        chat = {"model": BODY["model"], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "priority": "low"}
        assert (await web.post("/v1/chat/completions", json=chat)).status_code == 200
        assert c.decode[0].seen[-1].priority == "low"


async def test_a_tenant_goes_no_higher_than_it_may_and_is_told(tmp_path: Path) -> None:
    plain, upper = new_token(), new_token()
    entries = TokenEntry("plain", hash_token(plain)), TokenEntry("upper", hash_token(upper), max_priority=Priority.HIGH)
    (tmp_path / "t").write_text("".join(entry.to_yaml() for entry in entries))
    assert read_tokens(tmp_path / "t") == entries
    async with Cluster(tokens_file=str(tmp_path / "t")) as c:
        lowered = instruments.FALLBACKS.labels("admission")._value.get()
        for token, tenant, asked, got in (
            (plain, "plain", "high", "normal"),
            (plain, "plain", "low", "low"),
            (upper, "upper", "high", "high"),
        ):
            done = await c.complete(request(max_tokens=2, priority=asked), metadata=(("authorization", f"Bearer {token}"),))
            assert (c.decode[0].seen[-1].priority, c.decode[0].seen[-1].tenant) == (got, tenant)
            assert (c.prefill[0].seen[-1].priority, c.prefill[0].seen[-1].tenant) == (got, tenant)
            said = [] if asked == got else ["priority high was lowered to normal, the most that the tenant may ask"]
            assert list(done.notices) == said
        assert instruments.FALLBACKS.labels("admission")._value.get() == lowered + 1


def test_what_travels_is_checked() -> None:
    assert Turn.parse("", "") == Turn() and Turn.parse("high", "a") == Turn(Priority.HIGH, "a")
    for priority, tenant in (("HIGH", ""), ("", "x" * 65)):
        with pytest.raises(InvalidRequest):
            Turn.parse(priority, tenant)
    with pytest.raises(InvalidConfig, match="max_priority must be low, normal, high"):
        TokenEntry("a", "0" * 64, max_priority="top")  # type: ignore[arg-type]
