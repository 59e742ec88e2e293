"""Where prompts are prefilled, as the router chooses, declares and counts it; over scripted workers."""

import grpc
import pytest

from shoal.config.router import RouterConfig
from shoal.errors import InvalidConfig
from shoal.router.instruments import FALLBACKS, PREFILLS
from tests.fakes.cluster import Cluster, request
from tests.fakes.workers import until

LONG = list(range(10, 60))  # 49 prefill tokens


def counted(at: str, reason: str) -> float:
    return PREFILLS.labels(at, reason)._value.get()


async def test_short_prompts_stay_on_decode_and_the_answer_says_so() -> None:
    before = counted("decode_worker", "short"), counted("prefill_worker", "long")
    async with Cluster(local_prefill_tokens=20) as c:
        short, long = await c.complete(request(max_tokens=3)), await c.complete(request(LONG, max_tokens=3))
        assert len(c.prefill[0].seen) == 1 and c.decode[0].seen[0].local_prefill.below_tokens == 20
        await until(lambda: not any(w.own_token_layers for w in c.router.registry.workers))
    assert (short.transfer.prefill_at, short.transfer.prefill_reason) == ("decode_worker", "short")
    assert (short.transfer.prefill_worker, short.transfer.payload_bytes, short.timings.prefill_ms) == ("", 0, 1.5)
    assert (long.transfer.prefill_at, long.transfer.prefill_reason) == ("prefill_worker", "long")
    assert long.transfer.prefill_worker == "prefill-0" and long.timings.prefill_ms == 3
    assert short.output_ids == long.output_ids and not short.notices
    assert (counted("decode_worker", "short"), counted("prefill_worker", "long")) == (before[0] + 1, before[1] + 1)


async def test_decode_may_keep_what_it_has_mostly_cached() -> None:
    async with Cluster(local_cached_share=0.5) as c:
        c.decode[0].cached_tokens = 30
        done = await c.complete(request(LONG, max_tokens=2))
        assert not c.prefill[0].seen
        await until(lambda: not any(w.own_token_layers or w.num_holders for w in c.router.registry.workers))
    assert (done.transfer.prefill_at, done.transfer.prefill_reason, done.cached_tokens) == ("decode_worker", "mostly_cached", 30)


async def test_short_prompts_need_no_prefill_worker_and_long_ones_do() -> None:
    async with Cluster(0, 1, local_prefill_tokens=20) as c:
        assert not c.router.registry.can_serve
        assert (await c.complete(request(max_tokens=2))).transfer.prefill_reason == "short"
        assert (await c.status(request(LONG)))[0] is grpc.StatusCode.UNAVAILABLE


async def test_the_fallback_is_declared_and_ends_when_a_prefill_worker_is_back() -> None:
    before = FALLBACKS.labels("prefill")._value.get()
    async with Cluster(prefill_fallback=True) as c:
        c.board.set(c.prefill[0], "dead")
        await until(lambda: not any(w.state == "ready" for w in c.router.registry.pool("prefill")))
        assert c.router.registry.can_serve
        done = await c.complete(request(max_tokens=2))
        assert (done.transfer.prefill_at, done.transfer.prefill_reason) == ("decode_worker", "no_prefill_worker")
        [notice] = done.notices
        assert "no prefill worker" in notice and FALLBACKS.labels("prefill")._value.get() == before + 1
        c.prefill[0].description.epoch += 1
        c.board.set(c.prefill[0], "ready")
        await until(lambda: any(w.state == "ready" for w in c.router.registry.pool("prefill")))
        done = await c.complete(request(max_tokens=2))
        assert done.transfer.prefill_at == "prefill_worker" and not done.notices


async def test_colocated_workers_are_served_without_a_prefill_pool() -> None:
    cluster = Cluster(0, 2)
    for worker in cluster.decode:
        worker.description.colocated = True
    async with cluster as c:
        assert c.router.registry.can_serve
        done = await c.complete(request(LONG, max_tokens=2))
    assert (done.transfer.prefill_at, done.transfer.prefill_reason) == ("decode_worker", "colocated")
    assert [len(worker.seen) for worker in cluster.decode].count(1) == 1


async def test_colocated_and_split_workers_side_by_side() -> None:
    """During a change from one to the other each gets only what it can do."""
    cluster = Cluster(1, 2)
    cluster.decode[1].description.colocated = True
    async with cluster as c:
        done = [await c.complete(request(LONG, max_tokens=2)) for _ in range(8)]
    sites = {(d.transfer.decode_worker, d.transfer.prefill_at) for d in done}
    assert sites == {("decode-0", "prefill_worker"), ("decode-1", "decode_worker")}


def test_bad_thresholds_are_refused() -> None:
    for settings, word in (({"local_prefill_tokens": -1}, "local_prefill_tokens"), ({"local_cached_share": 2.0}, "share")):
        with pytest.raises(InvalidConfig, match=word):
            RouterConfig("m", controller="127.0.0.1:1", **settings)  # type: ignore[arg-type]
