"""HTTP connections: a client that leaves ends both legs, a slow reader slows only itself, a drain lets answers finish."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from shoal.config.router import RouterConfig
from shoal.errors import InvalidConfig
from shoal.metrics import REGISTRY
from shoal.router.app import Router
from tests.fakes.cluster import Board, Cluster
from tests.fakes.workers import until

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as c:
        c.decode[0].script = [40]
        yield c


async def test_leaving_a_stream_or_a_whole_answer_ends_both_legs(cluster: Cluster) -> None:
    worker = cluster.decode[0]
    worker.delay_s = 0.01
    async with openai.AsyncOpenAI(base_url=cluster.http + "/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model="", messages=ASK["messages"], stream=True)
        await anext(aiter(stream))
        assert worker.running == 1
        await stream.close()
        await worker.idle()
        whole = asyncio.create_task(client.chat.completions.create(model="", messages=ASK["messages"]))
        await worker.busy()
        whole.cancel()
        await worker.idle()
        many = asyncio.create_task(client.completions.create(model="", prompt=["a", "b", "c"]))
        await until(lambda: worker.running == 3)
        many.cancel()
        await worker.idle()
    worker.hang = True  # no token yet: prefill's leg hangs as well
    cluster.prefill[0].hang = True
    async with httpx2.AsyncClient(base_url=cluster.http) as http:
        waiting = asyncio.create_task(http.post(CHAT, json=ASK | {"stream": True}))
        await cluster.prefill[0].busy()
        waiting.cancel()
        await worker.idle()
        await cluster.prefill[0].idle()


async def test_request_ids_are_echoed_and_need_not_be_unique(cluster: Cluster) -> None:
    async with httpx2.AsyncClient(base_url=cluster.http) as http:
        asks = [http.post(CHAT, json=ASK | {"max_tokens": 2}, headers={"x-request-id": "same"}) for _ in range(20)]
        answers = await asyncio.gather(*asks)
        assert all(answer.headers["x-request-id"] == "same" for answer in answers)
        assert all(answer.json()["id"] == "chatcmpl-same" for answer in answers)
        assert all(answer.json()["usage"]["completion_tokens"] == 2 for answer in answers)
        drawn = await http.post(CHAT, json=ASK | {"max_tokens": 2})
        assert drawn.headers["x-request-id"] == drawn.json()["id"].removeprefix("chatcmpl-") != ""
        too_long = await http.post(CHAT, json=ASK, headers={"x-request-id": "x" * 300})
        assert too_long.status_code == 400


async def test_gRPC_abort_ends_an_http_request_with_what_it_has(cluster: Cluster) -> None:
    cluster.decode[0].delay_s = 0.01
    async with httpx2.AsyncClient(base_url=cluster.http) as http:
        running = asyncio.create_task(http.post(CHAT, json=ASK, headers={"x-request-id": "mine"}))
        await until(lambda: cluster.decode[0].num_sent > 2)
        assert await cluster.router.service.abort(["mine"]) == 1
        answer = (await running).json()
    assert answer["choices"][0]["finish_reason"] == "abort" and answer["choices"][0]["message"]["content"]


async def test_a_reader_that_stops_reading_holds_up_its_own_request_only(cluster: Cluster) -> None:
    worker = cluster.decode[0]
    worker.batch = 16
    host, _, port = cluster.http.removeprefix("http://").partition(":")
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.connect((host, int(port)))
    small.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=small, limit=1024)
    body = json.dumps(ASK | {"stream": True, "logprobs": True, "top_logprobs": 1}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    before, taken = generated(), -1
    while taken != generated() - before or not taken:  # until the router takes no more from the worker
        taken = generated() - before
        await asyncio.sleep(0.3)
    assert 16 <= taken < 6_000  # the answer has 8,160 tokens
    async with httpx2.AsyncClient(base_url=cluster.http) as http:
        assert (await http.post(CHAT, json=ASK | {"max_tokens": 3})).status_code == 200
    assert generated() - before == taken + 3
    told = b""
    while not told.endswith(b"0\r\n\r\n"):
        told += await asyncio.wait_for(reader.read(1 << 16), 10)
    assert generated() - before > 8_000 and told.count(b'"content":"') > 400 and b"[DONE]" in told
    writer.close()
    await worker.idle()


def generated() -> float:
    return REGISTRY.get_sample_value("shoal_router_generated_tokens_total") or 0.0


async def test_stopping_lets_answers_finish_and_takes_no_new_ones() -> None:
    async with Cluster() as c:
        c.decode[0].script, c.decode[0].delay_s = [40], 0.02
        async with httpx2.AsyncClient(base_url=c.http) as http:
            running = asyncio.create_task(http.post(CHAT, json=ASK | {"max_tokens": 20}))
            await until(lambda: c.decode[0].num_sent > 2)
            stopping = asyncio.create_task(c.router.stop(5.0))
            assert (await running).json()["usage"]["completion_tokens"] == 20
            await stopping
            with pytest.raises(httpx2.ConnectError):
                await http.get("/health")


async def test_what_outlasts_the_drain_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    async with Cluster() as c:
        c.decode[0].script, c.decode[0].delay_s = [40], 0.02
        async with httpx2.AsyncClient(base_url=c.http) as http:
            whole = asyncio.create_task(http.post(CHAT, json=ASK))
            stream = asyncio.create_task(http.post(CHAT, json=ASK | {"stream": True}))
            await until(lambda: c.decode[0].num_sent > 8)
            await c.router.stop(0.0)
            refused, ended = await whole, await stream
    assert refused.status_code == 503 and "the router is stopping" in refused.json()["error"]["message"]
    last = ended.text.strip().split("\n\n")[-1]
    assert "the router is stopping" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert "Traceback" not in caplog.text


async def test_metrics_and_counts_by_path_and_status(cluster: Cluster) -> None:
    async with httpx2.AsyncClient(base_url=cluster.http) as http:
        await http.get("/nowhere")
        text = (await http.get("/metrics")).text
    assert 'shoal_router_http_requests_total{path="other",status="404"}' in text and "shoal_router_ttft_seconds" in text


async def test_addresses_that_cannot_be_served_are_refused(cluster: Cluster) -> None:
    taken = cluster.http.removeprefix("http://")
    for address, words in ((taken, "cannot serve HTTP"), ("0.0.0.0:0", "every interface"), ("nowhere", "must be host:port")):
        config = RouterConfig(model="smollm2-135m", listen="127.0.0.1:0", http_listen=address, controller="127.0.0.1:1")
        router = Router(config, endpoints=Board())
        with pytest.raises(InvalidConfig, match=words):
            await router.start()
