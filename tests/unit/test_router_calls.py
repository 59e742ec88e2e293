"""Which way the router calls its workers: their session, or a call of its own where there is none, counted and told."""

import asyncio
import logging
from typing import Any

import grpc
import pytest

from shoal.errors import CapacityExceeded
from shoal.pb.internal.v1 import worker_pb2
from shoal.router import calls as module
from shoal.router.calls import WorkerCalls
from shoal.router.instruments import LOST_SESSIONS, PLAIN_CALLS
from tests.fakes.cluster import Cluster, request
from tests.fakes.workers import FakeWorker, until

ASK = list(range(20))


def plain(pool: str, reason: str) -> float:
    return float(PLAIN_CALLS.labels(pool, reason)._value.get())


def calls_of(c: Cluster, worker: FakeWorker) -> WorkerCalls:
    return next(known.calls for known in c.router.registry.workers if known.worker_id == worker.worker_id)


async def sessions_open(c: Cluster) -> None:
    await until(lambda: all(worker.calls.is_open for worker in c.router.registry.workers))


def counts() -> dict[tuple[str, str], float]:
    return {(pool, why): plain(pool, why) for pool in ("prefill", "decode") for why in ("size", "not_open", "unsupported")}


async def test_both_legs_go_over_sessions() -> None:
    async with Cluster(1, 1) as c:
        await sessions_open(c)
        before = counts()
        replies = await c.replies(request(ASK, visibility="speed:22", max_tokens=5, ignore_eos=True, stream=True))
        assert replies[-1].complete.completion_tokens == 5 and replies[-1].complete.transfer.payload_bytes
        assert counts() == before and len(c.prefill[0].seen) == len(c.decode[0].seen) == 1
        assert not c.router.registry.workers[0].calls.num_calls


async def test_an_older_worker_is_called_plainly_and_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, module.__name__)
    async with Cluster(1, 1) as c:
        pass
    c = Cluster(1, 1)
    for worker in c.workers:
        worker.knows_sessions = False
    async with c:
        await until(lambda: len([r for r in caplog.records if "knows no sessions" in r.message]) == 2)
        before = counts()
        for _ in range(2):
            replies = await c.replies(request(ASK, visibility="speed:22", max_tokens=5, ignore_eos=True))
            assert replies[-1].complete.completion_tokens == 5
        assert {key: value - before[key] for key, value in counts().items() if value != before[key]} == {
            ("prefill", "unsupported"): 2, ("decode", "unsupported"): 2,
        }  # fmt: skip
        assert len([r for r in caplog.records if "knows no sessions" in r.message]) == 2


async def test_a_large_request_is_a_call_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", 120)
    async with Cluster(1, 1) as c:
        await sessions_open(c)
        before = counts()
        replies = await c.replies(request(list(range(100, 400)), max_tokens=5, ignore_eos=True))
        assert replies[-1].complete.completion_tokens == 5
        assert counts()["prefill", "size"] - before["prefill", "size"] == 1
        assert counts()["decode", "size"] - before["decode", "size"] == 1


async def test_a_lost_session_is_retried_elsewhere_told_and_opened_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, module.__name__)
    async with Cluster(1, 2) as c:
        await sessions_open(c)
        for worker in c.decode:
            worker.delay_s = 0.03
        lost = float(LOST_SESSIONS.labels("decode")._value.get())
        ask = request(ASK, max_tokens=12, ignore_eos=True, stream=True)
        running = asyncio.create_task(c.replies(ask))
        await until(lambda: any(worker.num_sent > 2 for worker in c.decode))
        struck = next(worker for worker in c.decode if worker.running)
        await struck.server.stop()
        replies = await running
        token_ids = [token for reply in replies for token in reply.chunk.token_ids]
        assert token_ids == [100, 101, 102, 103, 104, 105, 106, 107, 100, 101, 102, 103]
        assert replies[-1].complete.num_retries == 1
        assert float(LOST_SESSIONS.labels("decode")._value.get()) == lost + 1
        assert "was lost" in caplog.text and not calls_of(c, struck).is_open
        await struck.idle()


async def test_a_closed_session_comes_back_with_the_next_report() -> None:
    async with Cluster(1, 1) as c:
        await sessions_open(c)
        calls = calls_of(c, c.decode[0])
        await calls.close()
        assert not calls.is_open
        await c.router.registry.reports()
        await until(lambda: calls.is_open)


async def test_errors_keep_their_code_and_when_to_come_back() -> None:
    async with Cluster(1, 1, max_retries=0) as c:
        await sessions_open(c)
        c.decode[0].error = CapacityExceeded("no blocks", retry_after_s=9)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.replies(request(ASK, max_tokens=5))
        trailing: Any = caught.value.trailing_metadata()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and ("retry-after", "9") in tuple(trailing)


async def test_a_prefill_that_is_given_up_ends_at_its_worker() -> None:
    async with Cluster(1, 1) as c:
        await sessions_open(c)
        c.prefill[0].hang = True
        asking = asyncio.create_task(calls_of(c, c.prefill[0]).prefill(worker_pb2.PrefillRequest(visibility="full"), 20.0))
        await c.prefill[0].busy()
        asking.cancel()
        await c.prefill[0].idle()
