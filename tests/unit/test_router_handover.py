"""What a draining worker gives up goes on elsewhere without using the request's tries; what a dead one leaves does use them."""

import asyncio

import grpc
import pytest

from shoal.errors import Cancelled, Unavailable
from shoal.pb.v1 import shoal_pb2
from tests.fakes.cluster import Cluster, request
from tests.fakes.workers import FakeDecodeWorker, until


async def stream(c: Cluster) -> tuple[list[int], shoal_pb2.GenerateComplete]:
    replies = await c.replies(request(list(range(10)), max_tokens=12, ignore_eos=True, stream=True))
    return [token for reply in replies for token in reply.chunk.token_ids], replies[-1].complete


async def strike(c: Cluster, state: str, struck: set[FakeDecodeWorker]) -> None:
    """The next decode worker that runs the request goes, with `state` announced first."""
    await until(lambda: any(worker.running and worker.num_sent > 2 for worker in set(c.decode) - struck))
    worker = next(worker for worker in c.decode if worker.running and worker not in struck)
    c.board.set(worker, state)
    await until(lambda: any(w.key == (worker.worker_id, 1) and w.state == state for w in c.router.registry.workers))
    worker.fail_after = (0, Cancelled("the decode worker is stopping"))
    struck.add(worker)


async def test_any_number_of_drains_costs_no_try() -> None:
    async with Cluster(1, 3, max_retries=0) as c:
        for worker in c.decode:
            worker.delay_s = 0.03
        running, struck = asyncio.create_task(stream(c)), set[FakeDecodeWorker]()
        for _ in range(2):
            await strike(c, "draining", struck)
        token_ids, complete = await running
        assert token_ids == [100, 101, 102, 103, 104, 105, 106, 107, 100, 101, 102, 103]
        assert complete.num_retries == 2 and [notice.split(" on ")[0].split(" after ")[0] for notice in complete.notices] == [
            "handed over",
            "handed over",
        ]


async def test_a_death_does_cost_one() -> None:
    async with Cluster(1, 2, max_retries=0) as c:
        for worker in c.decode:
            worker.delay_s = 0.03
        running = asyncio.create_task(stream(c))
        await strike(c, "dead", set())
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await running
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_when_prefill_complains_the_next_attempt_avoids_both_ends_of_the_link() -> None:
    async with Cluster(1, 2) as c:
        c.prefill[0].next_error = Unavailable("the control stream to the decode worker ended")
        token_ids, complete = await stream(c)
        assert len(token_ids) == 12 and complete.num_retries == 1
        assert [len(worker.seen) for worker in c.decode] == [1, 1]
