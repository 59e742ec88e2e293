"""Two legs, one end: the router over scripted workers on real gRPC."""

import asyncio
import time

import grpc
import pytest

from shoal.errors import Cancelled, CapacityExceeded, InternalError, Mismatch, Unavailable
from shoal.pb.internal.v1 import controller_pb2, worker_pb2
from shoal.pb.v1 import shoal_pb2
from tests.fakes.cluster import Cluster, request
from tests.fakes.workers import ENTRY_BYTES, until

CODE = grpc.StatusCode


async def test_one_answer_with_every_figure() -> None:
    async with Cluster() as c:
        done = await c.complete(request(max_tokens=4, request_id="mine", visibility="speed:22", seed=5))
        [decode_call], [prefill_call] = c.decode[0].seen, c.prefill[0].seen
    assert list(done.output_ids) == [100, 101, 102, 103] and done.finish_reason == "length"
    assert (done.prompt_tokens, done.completion_tokens, done.cached_tokens, done.seed) == (10, 4, 0, 5)
    assert done.visibility == "speed:22:boundary=1" == decode_call.visibility == prefill_call.visibility
    assert list(prefill_call.prompt_ids) == list(range(10, 19)) and prefill_call.num_prompt_tokens == 10
    assert prefill_call.decode_address == c.decode[0].description.address
    assert (prefill_call.decode_worker_id, prefill_call.decode_epoch) == ("decode-0", 1)
    transfer = done.transfer
    assert transfer.plan_bytes == transfer.payload_bytes == 22 * ENTRY_BYTES and transfer.num_entries == 22
    assert transfer.full_depth_bytes == 9 * 30 * 2 * 3 * 64 * 4  # T · L · 2 · kv_heads · head_dim · float32
    assert (transfer.prefill_worker, transfer.decode_worker) == ("prefill-0", "decode-0")
    assert (done.decode_kv.layer_tokens, done.decode_kv.bytes) == (7, 70)
    t = done.timings
    assert t.prefill_ms == 3 and t.transfer_ms == 0.5 and 0 < t.ttft_ms <= t.total_ms and t.reserve_ms > 0
    assert t.ttft_ms >= t.tokenize_ms + t.reserve_ms and t.tpot_ms > 0
    assert done.num_retries == 0 and not done.notices
    assert decode_call.sampling.max_tokens == 4 and 2 in decode_call.sampling.stop_token_ids


async def test_a_stream_says_the_same_as_one_answer_and_usage_once() -> None:
    async with Cluster() as c:
        c.decode[0].script = [28120, 28, 905, 17, 198, 57, 2]
        whole = await c.complete(request(logprobs=1))
        *chunks, last = [r for r in await c.replies(request(logprobs=1, stream=True, request_id="r"))]
    assert {r.request_id for r in [*chunks, last]} == {"r"}
    assert all(r.HasField("chunk") for r in chunks) and last.HasField("complete") and chunks
    done = last.complete
    assert [i for r in chunks for i in r.chunk.token_ids] == list(done.output_ids) == list(whole.output_ids)
    assert "".join(r.chunk.text for r in chunks) == done.text == whole.text != ""
    assert chunks[-1].chunk.completion_tokens == done.completion_tokens == whole.completion_tokens == 7
    assert done.finish_reason == whole.finish_reason == "stop" and done.matched_token_id == 2
    assert list(done.output_logprobs.token_ids) == list(done.output_ids)
    assert [list(t.token_ids) for t in done.output_logprobs.top_logprobs] == [[i] for i in done.output_ids]
    assert sum(len(r.chunk.output_logprobs.token_ids) for r in chunks) == 7


async def test_no_logprobs_unless_asked() -> None:
    async with Cluster() as c:
        done = await c.complete(request(max_tokens=2))
        zero = await c.complete(request(max_tokens=2, logprobs=0))
    assert not done.HasField("output_logprobs")
    assert len(zero.output_logprobs.token_logprobs) == 2


async def test_prefill_is_not_called_when_nothing_is_to_be_transferred() -> None:
    async with Cluster(num_prefill=1) as c:
        short = await c.complete(request(ids=[7], max_tokens=2, visibility="speed:22"))
        wide = await c.complete(request(max_tokens=2, visibility="full:boundary=10"))
        c.decode[0].cached_tokens = 9
        cached = await c.complete(request(max_tokens=2))
        assert not c.prefill[0].seen
    for done in (short, wide, cached):
        assert list(done.output_ids) == [100, 101]
        assert done.transfer.payload_bytes == done.transfer.plan_bytes == 0 and done.transfer.prefill_worker == ""
    assert cached.cached_tokens == 9


async def test_salts_reach_both_workers() -> None:
    async with Cluster() as c:
        await c.complete(request(max_tokens=2, cache_salt="own"))
        assert [seen.cache_salt for seen in (c.decode[0].seen[0], c.prefill[0].seen[0])] == ["own", "own"]
        code, words = await c.status(request(cache_salt="x" * 257))
    assert code is CODE.INVALID_ARGUMENT and "256" in words


@pytest.mark.parametrize(
    ("error", "code"),
    [(Mismatch("dtype: float32 != bfloat16"), CODE.FAILED_PRECONDITION), (InternalError("a secret"), CODE.INTERNAL)],
)
async def test_the_prefill_legs_error_ends_the_decode_leg(error: Exception, code: grpc.StatusCode) -> None:
    async with Cluster() as c:
        c.prefill[0].error = error  # type: ignore[assignment]
        started = time.monotonic()
        got, words = await c.status(request())
        await c.decode[0].idle()
        assert got is code and "secret" not in words and time.monotonic() - started < 2
        assert len(c.prefill[0].seen) == len(c.decode[0].seen) == 1  # such errors are not retried


async def test_the_decode_legs_error_ends_the_prefill_leg() -> None:
    async with Cluster(max_retries=0) as c:
        c.prefill[0].hang = True
        task = asyncio.create_task(c.status(request()))
        await c.prefill[0].busy()
        await c.decode[0].stop()  # its connection breaks
        code, words = await asyncio.wait_for(task, 2)
        assert code is CODE.UNAVAILABLE and "decode-0" in words
        await c.prefill[0].idle()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_client_that_leaves_ends_both_legs(how: str) -> None:
    async with Cluster() as c:
        c.prefill[0].hang = True
        call = c.stub.Generate(request(stream=True), timeout=0.3 if how == "deadline" else None)
        await c.prefill[0].busy()
        if how == "cancel":
            call.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else grpc.aio.AioRpcError) as caught:
            await call.read()
        if how == "deadline":
            assert caught.value.code() is CODE.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        await c.prefill[0].idle()
        await c.decode[0].idle()
        info = await c.stub.GetServerInfo(shoal_pb2.GetServerInfoRequest())
        assert info.active_requests == 0
        for worker in c.router.registry.workers:
            assert (worker.num_holders, worker.own_token_layers) == (0, 0)


async def test_a_client_that_leaves_mid_stream_ends_decode() -> None:
    async with Cluster() as c:
        c.decode[0].delay_s = 0.01
        call = c.stub.Generate(request(stream=True))
        await call.read()
        call.cancel()
        await c.decode[0].idle()


async def test_a_leg_cancelled_by_its_worker_is_unavailable_not_cancelled() -> None:
    async with Cluster(max_retries=0) as c:
        c.decode[0].fail_after = (0, Cancelled("the pair is gone"))
        assert (await c.status(request()))[0] is CODE.UNAVAILABLE
        c.decode[0].fail_after = None
        c.prefill[0].error = Cancelled("the pair is gone")
        assert (await c.status(request()))[0] is CODE.UNAVAILABLE
        await c.decode[0].idle()


async def test_a_stream_that_ends_early_is_a_failure() -> None:
    async with Cluster(max_retries=0) as c:
        c.decode[0].fail_after = (2, Unavailable("gone"))
        call = c.stub.Generate(request(stream=True))
        ids: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for reply in call:
                ids += reply.chunk.token_ids
        assert caught.value.code() is CODE.UNAVAILABLE and ids == [100, 101]  # what was sampled is not lost


async def test_a_worker_declared_dead_ends_its_requests_at_once() -> None:
    async with Cluster(max_retries=0) as c:
        c.decode[0].hang = True  # its connection stays open
        task = asyncio.create_task(c.status(request()))
        await c.decode[0].busy()
        await asyncio.sleep(0.05)
        c.board.set(c.decode[0], "dead")
        code, words = await asyncio.wait_for(task, 2)
        assert code is CODE.UNAVAILABLE and "decode-0 died" in words
        await c.decode[0].idle()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_a_failure_before_the_first_token_is_retried_elsewhere_and_told(pool: str) -> None:
    async with Cluster(2, 2) as c:
        bad = getattr(c, pool)[0]
        bad.error = Unavailable("the pair broke")
        bad_calls = 0
        for _ in range(12):
            done = await c.complete(request(max_tokens=3))
            assert list(done.output_ids) == [100, 101, 102]
            if done.num_retries:
                bad_calls += 1
                assert len(done.notices) == 1 and bad.worker_id in done.notices[0] and "the pair broke" in done.notices[0]
                assert bad.worker_id not in (done.transfer.prefill_worker, done.transfer.decode_worker)
        assert bad_calls == len(bad.seen) > 0


async def test_a_prefill_worker_that_fails_once_tokens_come_is_needed_no_more() -> None:
    async with Cluster(flush_s=0.0) as c:
        c.prefill[0].hang_delivered = True  # all has arrived, and its own answer never comes
        c.decode[0].delay_s = 0.02
        replies = aiter(c.stub.Generate(request(stream=True, max_tokens=30)))
        await anext(replies)
        c.board.set(c.prefill[0], "dead")
        *_, last = [reply async for reply in replies]
        assert last.complete.completion_tokens == 30 and last.complete.num_retries == 0


async def test_retries_are_bounded_and_may_be_off() -> None:
    for retries, calls in ((0, 1), (1, 2), (2, 3)):
        async with Cluster(1, 3, max_retries=retries) as c:
            for worker in c.decode:
                worker.error = Unavailable("broken")
            code, words = await c.status(request())
            assert code is CODE.UNAVAILABLE and "broken" in words
            assert sum(len(worker.seen) for worker in c.decode) == calls
            assert max(len(worker.seen) for worker in c.decode) == 1


async def test_a_worker_killed_after_tokens_were_sent_is_replaced_without_loss_or_repeat() -> None:
    async with Cluster(1, 2) as c:
        for worker in c.decode:
            worker.script = list(range(1000, 1040))
        c.decode[0].fail_after = c.decode[1].fail_after = (7, Unavailable("killed"))
        task = asyncio.create_task(c.replies(request(max_tokens=12, stream=True)))
        *chunks, last = await task
        done = last.complete
        assert list(done.output_ids) == list(range(1000, 1012)) == [i for r in chunks for i in r.chunk.token_ids]
        assert done.num_retries == 1 and "resumed after 7 tokens" in done.notices[0]
        assert done.text == "".join(r.chunk.text for r in chunks)
        parts = done.timings
        assert parts.tokenize_ms + parts.reserve_ms + parts.prefill_ms + parts.transfer_ms <= parts.ttft_ms + 3.5
        [first], [second] = sorted((w.seen for w in c.decode), key=lambda seen: len(seen[0].replay_token_ids))
        assert list(second.replay_token_ids) == list(range(1000, 1007)) and not first.replay_token_ids
        assert (first.sampling.max_tokens, second.sampling.max_tokens) == (12, 5)
        assert first.prompt_ids == second.prompt_ids and first.visibility == second.visibility


async def test_a_final_message_lost_after_the_last_token_loses_nothing() -> None:
    async with Cluster(1, 1) as c:
        c.decode[0].forget_end = True
        done = await c.complete(request(max_tokens=4))
        assert list(done.output_ids) == [100, 101, 102, 103] and done.finish_reason == "length"
        assert done.num_retries == 0 and "computed, not counted" in done.notices[0]
        assert done.transfer.payload_bytes == 30 * ENTRY_BYTES  # as the prefill worker counted
        assert done.decode_kv.layer_tokens == (9 + 4) * 30  # (P + t) · L


async def test_a_full_decode_worker_is_passed_over_and_a_full_pool_is_resource_exhausted() -> None:
    async with Cluster(1, 2) as c:
        c.decode[0].error = CapacityExceeded("0 blocks free")
        for _ in range(6):
            assert (await c.complete(request(max_tokens=1))).transfer.decode_worker == "decode-1"
        c.decode[1].error = CapacityExceeded("0 blocks free")
        code, words = await c.status(request())
        assert code is CODE.RESOURCE_EXHAUSTED and "0 blocks free" in words


async def test_balance_follows_own_work_and_the_workers_reports() -> None:
    async with Cluster(1, 2, load_interval_s=0.02) as c:
        c.decode[0].outstanding = 10**9  # another router's work
        await asyncio.sleep(0.1)
        for _ in range(8):
            assert (await c.complete(request(max_tokens=1))).transfer.decode_worker == "decode-1"
        c.decode[0].outstanding = 0
        await asyncio.sleep(0.1)
        c.decode[0].delay_s = c.decode[1].delay_s = 0.05
        done = await asyncio.gather(*(c.complete(request(max_tokens=4)) for _ in range(8)))
        counts = [sum(d.transfer.decode_worker == w.worker_id for d in done) for w in c.decode]
        assert counts == [4, 4]


async def test_a_worker_that_does_not_answer_is_chosen_last() -> None:
    async with Cluster(1, 2, load_interval_s=0.05) as c:
        c.decode[0].is_silent = True
        silent = next(w for w in c.router.registry.workers if w.worker_id == "decode-0")
        await until(lambda: not silent.answers)
        for _ in range(6):
            assert (await c.complete(request(max_tokens=1))).transfer.decode_worker == "decode-1"


async def test_a_storm_of_cancels_leaves_nothing_behind() -> None:
    async with Cluster(2, 2) as c:
        for worker in c.decode:
            worker.delay_s = 0.001
        c.prefill[0].error = Unavailable("the pair broke")  # so that retries are among what is cancelled

        async def leave_after(delay_s: float) -> None:
            call = c.stub.Generate(request(stream=True, max_tokens=50))
            await asyncio.sleep(delay_s)
            call.cancel()

        await asyncio.gather(*(leave_after(i * 0.0005) for i in range(100)))
        for worker in c.workers:
            await worker.idle()
        await until(lambda: not any(w.num_holders or w.own_token_layers for w in c.router.registry.workers))
        assert (await c.stub.GetServerInfo(shoal_pb2.GetServerInfoRequest())).active_requests == 0
        assert (await c.complete(request(max_tokens=2))).completion_tokens == 2


async def test_a_prefill_worker_that_dies_before_it_is_called_ends_the_request_at_once() -> None:
    async with Cluster(max_retries=0) as c:
        c.decode[0].reserve_s = 60.0
        task = asyncio.create_task(c.status(request()))
        await c.decode[0].busy()
        c.board.set(c.prefill[0], "dead")
        code, words = await asyncio.wait_for(task, 2)
        assert code is CODE.UNAVAILABLE and "prefill-0 died" in words
        await c.decode[0].idle()
        assert not c.prefill[0].seen


async def test_a_worker_restarted_without_a_description_yet_ends_what_ran_on_it() -> None:
    async with Cluster(max_retries=0) as c:
        c.decode[0].hang = True
        task = asyncio.create_task(c.status(request()))
        await c.decode[0].busy()
        starting = worker_pb2.WorkerDescription(worker_id="decode-0", pool="decode", epoch=2)
        c.router.registry.update(controller_pb2.Endpoints(endpoints=[controller_pb2.Endpoint(worker=starting, state="starting")]))
        code, words = await asyncio.wait_for(task, 2)
        assert code is CODE.UNAVAILABLE and "decode-0 was restarted" in words
