"""Breakers: pure first, then a router over fake workers: faults open them, refusals and clients' doings never do."""

import asyncio

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import Cancelled, CapacityExceeded, DeadlineExceeded, InternalError, InvalidRequest, Mismatch, Unavailable
from shoal.pb.v1 import shoal_pb2
from shoal.router import instruments
from shoal.router.breaker import Breaker, BreakerOptions, BreakerState
from tests.fakes.cluster import Cluster, request
from tests.fakes.workers import until

OPTIONS = BreakerOptions(num_faults=3, open_s=2.0, max_open_s=7.0)
CLOSED, HALF, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


def opened(now: float = 10.0) -> Breaker:
    breaker = Breaker(OPTIONS)
    for _ in range(OPTIONS.num_faults):
        assert breaker.allows(now)
        breaker.begin(now)
        breaker.fail(now)
    return breaker


def test_faults_in_a_row_open_it_and_one_success_between_does_not_let_them_add_up() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(10):
        breaker.fail(1.0)
        breaker.fail(1.0)
        breaker.succeed()
    assert breaker.state is CLOSED
    breaker = opened(10.0)
    assert breaker.state is OPEN and not breaker.allows(11.9) and breaker.waits_s(11.5) == 0.5


def test_faults_of_requests_that_ran_side_by_side_count_once() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(20):
        breaker.fail(5.0, begun_at=4.0)  # one torn pair
    assert breaker.state is CLOSED
    breaker.fail(6.0, begun_at=5.5)
    assert breaker.state is CLOSED
    breaker.fail(7.0, begun_at=6.5)
    assert breaker.state is OPEN  # three in a row
    breaker.begin(9.0)
    breaker.fail(9.1, begun_at=4.0)  # a straggler: it is not the one that tries
    assert breaker.state is HALF


def test_one_request_probes_and_each_failure_doubles_the_wait_up_to_a_limit() -> None:
    breaker, now = opened(10.0), 10.0
    for open_s in (2.0, 4.0, 7.0, 7.0):
        assert not breaker.allows(now + open_s - 0.01)
        now += open_s
        assert breaker.allows(now)
        breaker.begin(now)
        assert breaker.state is HALF and not breaker.allows(now)  # no second one
        breaker.fail(now)
        assert breaker.state is OPEN
    breaker.begin(now + 7)
    breaker.succeed()
    assert breaker.state is CLOSED and breaker.allows(now)
    for _ in range(OPTIONS.num_faults):
        breaker.fail(now)
    assert breaker.waits_s(now) == 2.0  # from the start again


def test_a_probe_that_proves_nothing_makes_room_for_the_next() -> None:
    breaker = opened(10.0)
    breaker.begin(12.0)
    breaker.give_up()
    assert breaker.state is OPEN and breaker.allows(12.0)
    breaker.give_up()
    closed = Breaker(OPTIONS)
    closed.give_up()
    assert closed.state is CLOSED


@given(st.lists(st.sampled_from(["begin", "fail", "succeed", "give up", "wait"]), max_size=60))
def test_it_always_lets_somebody_try_in_the_end(happens: list[str]) -> None:
    breaker, now, running = Breaker(OPTIONS), 0.0, 0
    for what in happens:
        if what == "begin" and breaker.allows(now):
            breaker.begin(now)
            running += 1
        elif what == "wait":
            now += 1.0
        elif running and what != "begin":
            running -= 1
            if what == "fail":
                breaker.fail(now)
            else:
                (breaker.succeed if what == "succeed" else breaker.give_up)()
    for _ in range(running):
        breaker.give_up()
    assert breaker.allows(now + OPTIONS.max_open_s)


def level(worker: str, leg: str) -> float:
    return float(instruments.BREAKER_STATE.labels(worker, leg)._value.get())


def opens(worker: str, leg: str) -> float:
    return float(instruments.BREAKER_TRANSITIONS.labels(worker, leg, "open")._value.get())


@pytest.mark.parametrize("leg", ["decode", "prefill"])
@pytest.mark.parametrize("fault", [Unavailable("broken"), InternalError("a bug")])
async def test_a_worker_that_fails_again_and_again_gets_nothing_until_it_is_well(leg: str, fault: Exception) -> None:
    async with Cluster(2, 2, max_retries=1) as c:
        pool = c.decode if leg == "decode" else c.prefill
        ill, well = pool
        before = opens(ill.worker_id, leg)
        ill.error = fault  # type: ignore[assignment]
        well.outstanding = 1 << 40  # so that the ill one is always preferred
        await c.router.registry.reports()
        outcomes = [await fails(c) for _ in range(8)]
        num_served = 8 if isinstance(fault, Unavailable) else 3  # a bug's request is not tried again
        assert sum(isinstance(outcome, list) for outcome in outcomes) == num_served
        assert len(ill.seen) == 5 and level(ill.worker_id, leg) == 1.0
        assert opens(ill.worker_id, leg) == before + 1 and level(well.worker_id, leg) == 0.0
        ill.error = None
        worker = next(w for w in c.router.registry.workers if w.worker_id == ill.worker_id)
        await until(lambda: worker._breaker.waits_s(asyncio.get_running_loop().time()) == 0)
        done = await c.complete(request(max_tokens=2))
        assert getattr(done.transfer, f"{leg}_worker") == ill.worker_id and level(ill.worker_id, leg) == 0.0


async def fails(c: Cluster) -> object:
    try:
        return await c.replies(request(max_tokens=2))
    except grpc.aio.AioRpcError as error:
        return error.code()


@pytest.mark.parametrize(
    "error", [InvalidRequest("no"), CapacityExceeded("full"), DeadlineExceeded("late"), Mismatch("dtype"), "cancel", "deadline"]
)
@pytest.mark.parametrize("leg", ["decode", "prefill"])
async def test_refusals_and_clients_doings_open_nothing(leg: str, error: Exception | str) -> None:
    async with Cluster(max_retries=0) as c:
        worker = (c.decode if leg == "decode" else c.prefill)[0]
        for _ in range(7):
            if isinstance(error, Exception):
                worker.error = error  # type: ignore[assignment]
                await fails(c)
            else:
                worker.hang = True
                call = c.stub.Generate(request(stream=True), timeout=0.2 if error == "deadline" else None)
                await worker.busy()
                if error == "cancel":
                    call.cancel()
                with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
                    while await call.read():
                        pass
                await worker.idle()
        worker.error, worker.hang = None, False
        assert len(worker.seen) == 7 and level(worker.worker_id, leg) == 0.0
        assert (await c.complete(request(max_tokens=2))).completion_tokens == 2


async def test_when_every_breaker_is_open_the_words_say_so_and_a_new_epoch_starts_closed() -> None:
    async with Cluster(max_retries=0) as c:
        c.decode[0].error = Unavailable("broken")
        for _ in range(5):
            await fails(c)
        code, words = await c.status(request())
        assert code is grpc.StatusCode.UNAVAILABLE and "decode-0 has failed its last requests (its breaker is open)" in words
        assert c.router.registry.can_serve  # readiness is the controller's word
        c.decode[0].error = None
        c.decode[0].description.epoch += 1
        c.board.publish()
        await until(lambda: any(w.epoch == 2 and w.state == "ready" for w in c.router.registry.workers))
        assert (await c.complete(request(max_tokens=2))).completion_tokens == 2 and level("decode-0", "decode") == 0.0


async def test_the_first_token_of_the_request_that_tries_lets_the_others_in() -> None:
    async with Cluster(max_retries=0) as c:
        c.decode[0].error = Unavailable("broken")
        for _ in range(5):
            await fails(c)
        [worker] = c.router.registry.pool("decode")
        c.decode[0].error = None
        await until(lambda: worker._breaker.waits_s(asyncio.get_running_loop().time()) == 0)
        stream = c.stub.Generate(request(max_tokens=500, stream=True))
        await stream.read()
        assert level("decode-0", "decode") == 0.0  # while it streams on
        assert (await c.complete(request(max_tokens=2))).completion_tokens == 2
        stream.cancel()


async def test_a_client_that_leaves_while_its_request_probes_keeps_nobody_out() -> None:
    async with Cluster(max_retries=0) as c:
        c.decode[0].error = Unavailable("broken")
        for _ in range(5):
            await fails(c)
        [worker] = c.router.registry.pool("decode")
        c.decode[0].error, c.decode[0].hang = None, True
        await until(lambda: worker._breaker.waits_s(asyncio.get_running_loop().time()) == 0)
        call = c.stub.Generate(request(stream=True))
        await c.decode[0].busy()
        assert level("decode-0", "decode") == 0.5
        call.cancel()
        await c.decode[0].idle()
        c.decode[0].hang = False
        assert (await c.complete(request(max_tokens=2))).completion_tokens == 2 and level("decode-0", "decode") == 0.0
        raised = Cancelled("by the worker")  # for a client, a worker that gives up has failed
        c.decode[0].error = raised
        for _ in range(5):
            assert await fails(c) is grpc.StatusCode.UNAVAILABLE
        assert level("decode-0", "decode") == 1.0


async def test_an_answer_that_the_router_ends_itself_is_one_that_ended_well() -> None:
    """A stop string or an abort: decode never says Finished, and has done its part."""
    async with Cluster(max_retries=0) as c:
        c.decode[0].error = Unavailable("broken")
        for _ in range(5):
            await fails(c)
        [worker] = c.router.registry.pool("decode")
        c.decode[0].error, c.decode[0].delay_s = None, 0.01
        await until(lambda: worker._breaker.waits_s(asyncio.get_running_loop().time()) == 0)
        running = asyncio.create_task(c.replies(request(max_tokens=400, request_id="mine")))
        await until(lambda: c.decode[0].num_sent > 2)
        await c.stub.Abort(shoal_pb2.AbortRequest(request_ids=["mine"]))
        await running
        await c.decode[0].idle()
        assert level("decode-0", "decode") == 0.0
