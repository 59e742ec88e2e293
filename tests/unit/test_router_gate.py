"""Early refusal: by what workers report and what this router sent since; through both doors, by class, over several workers."""

import time
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from shoal.errors import Unavailable
from shoal.pb.v1 import shoal_pb2
from shoal.router import instruments
from tests.fakes.cluster import Cluster, request
from tests.fakes.workers import until

CODE = grpc.StatusCode
BUSY: dict[str, Any] = {
    "num_total_blocks": 3000,
    "num_used_blocks": 2990,
    "num_reservations": 30,
    "max_reservations": 64,
    "mean_hold_s": 20.0,
    "classes": [shoal_pb2.ClassLoad(priority="low", num_waiting_reqs=9, num_waiting_blocks=4000)],
}
FREE = BUSY | {"num_used_blocks": 0, "classes": []}


async def set_report(c: Cluster, pool: str, *reports: dict[str, Any]) -> None:
    for worker, report in zip(c.decode if pool == "decode" else c.prefill, reports, strict=True):
        worker.report = report
    await c.router.registry.reports()


async def refused(c: Cluster, **call: Any) -> tuple[grpc.aio.AioRpcError, dict[str, str]]:
    fields = {"max_tokens": 400, **{k: call.pop(k) for k in ("priority",) if k in call}}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await c.replies(request(**fields), **call)
    return caught.value, dict(caught.value.trailing_metadata() or ())


async def test_a_wait_beyond_the_bound_is_refused_at_once_with_numbers_and_when_to_come_back() -> None:
    async with Cluster(max_wait_s=3.0, load_interval_s=60) as c, httpx.AsyncClient(base_url=c.http) as web:
        await c.complete(request(max_tokens=2))
        await set_report(c, "decode", BUSY)
        before, num_seen = instruments.REFUSED.labels("wait")._value.get(), len(c.decode[0].seen)
        started = time.monotonic()
        error, trailers = await refused(c)
        assert error.code() is CODE.RESOURCE_EXHAUSTED and time.monotonic() - started < 1
        # 30 layers of ⌈409 / 16⌉ blocks: (2990 + 780 − 3000) / 3000 of 20 s
        assert "would wait about 5.1 s for its start, beyond the limit of 3 s" in (error.details() or "")
        assert "2990 of 3000 KV blocks used, 30 of 64 places taken, 0 requests before it wait for 0" in (error.details() or "")
        assert trailers["retry-after"] == "3"
        body = {"model": "smollm2-135m", "prompt": [10, 11], "max_tokens": 400}
        answer = await web.post("/v1/completions", json=body)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["code"] == "capacity_exceeded"
        assert instruments.REFUSED.labels("wait")._value.get() == before + 2 and len(c.decode[0].seen) == num_seen
        error, _ = await refused(c, priority="low")
        assert "wait about 31.8 s" in (error.details() or "") and "9 requests before it wait for 4000" in (error.details() or "")
        assert (await c.complete(request(max_tokens=2))).completion_tokens == 2  # a short one would wait 0.1 s
        await set_report(c, "decode", FREE)
        assert (await c.complete(request(max_tokens=400))).completion_tokens == 400


async def test_a_wait_beyond_the_deadline_says_so() -> None:
    async with Cluster(max_wait_s=60.0, load_interval_s=60) as c:
        await set_report(c, "decode", BUSY)
        before = instruments.REFUSED.labels("deadline")._value.get()
        error, trailers = await refused(c, timeout=2.0)
        assert error.code() is CODE.RESOURCE_EXHAUSTED and "later than its own deadline, 2.0 s from now" in (
            error.details() or ""
        )
        assert trailers["retry-after"] == "4" and instruments.REFUSED.labels("deadline")._value.get() == before + 1


async def test_a_crowded_worker_is_passed_over_for_one_with_room() -> None:
    async with Cluster(1, 2, max_wait_s=3.0, load_interval_s=60) as c:
        c.decode[1].outstanding = 1 << 40  # has room, and much to do
        await set_report(c, "decode", BUSY, FREE)
        assert (await c.complete(request(max_tokens=400))).transfer.decode_worker == "decode-1"
        await set_report(c, "decode", BUSY, BUSY | {"num_used_blocks": 2995})
        error, _ = await refused(c)
        assert "decode-0" in (error.details() or "")  # the one that would be first
    async with Cluster(1, 1, max_wait_s=0, load_interval_s=60) as c:
        await set_report(c, "decode", BUSY)
        assert (await c.complete(request(max_tokens=400))).completion_tokens == 400  # no bound


async def test_prefill_s_queue_counts_by_class() -> None:
    async with Cluster(max_wait_s=3.0, load_interval_s=60) as c:
        queue = [shoal_pb2.ClassLoad(priority="normal", outstanding_token_layers=4000)]
        await set_report(c, "prefill", {"token_layers_per_s": 1000.0, "classes": queue})
        error, _ = await refused(c)
        assert "prefill worker prefill-0: 4000 token-layers before it at 1000 a second" in (error.details() or "")
        assert (await c.complete(request(max_tokens=2, priority="high"))).completion_tokens == 2


async def test_what_was_sent_since_the_last_report_counts() -> None:
    """A burst within one interval: three fit, a fourth would wait 0.8 s, a fifth 6 s."""
    async with Cluster(max_wait_s=5.0, load_interval_s=60) as c:
        c.decode[0].hang = True
        await set_report(c, "decode", FREE)
        calls = [c.stub.Generate(request(max_tokens=400)) for _ in range(4)]
        await until(lambda: len(c.decode[0].seen) == 4)
        error, _ = await refused(c)
        assert "would wait about 6.0 s" in (error.details() or "")
        await c.router.registry.reports()
        assert not any(worker.sent for worker in c.router.registry.workers)  # it is for the report to say now
        for call in calls:
            call.cancel()
        await c.decode[0].idle()


async def test_room_on_a_worker_whose_breaker_is_open_is_no_room() -> None:
    async with Cluster(1, 2, max_wait_s=3.0, load_interval_s=60, max_retries=0) as c:
        c.decode[0].error = Unavailable("broken")
        c.decode[1].outstanding = 1 << 40
        await set_report(c, "decode", FREE, BUSY)
        for _ in range(5):
            await c.status(request(max_tokens=2))
        error, _ = await refused(c)
        assert error.code() is CODE.RESOURCE_EXHAUSTED and "decode-1" in (error.details() or "")
