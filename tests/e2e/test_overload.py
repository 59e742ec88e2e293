"""More than there is room for: everybody in line is served, early refusals keep the waits of the others short, full is well."""

import asyncio
import itertools
import random
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.config.router import RouterConfig
from shoal.config.worker import Pool
from shoal.decode_worker import step_loop
from shoal.pb.v1 import shoal_pb2
from shoal.router.app import Router
from shoal.rpc import open_channel
from shoal.types import USUAL_TURN
from shoal.visibility import Visibility
from tests.e2e.harness import MIXED, Ask, ends_with, generate, in_process, make_config
from tests.e2e.served import Served, ask, served
from tests.fakes.workers import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(address: str) -> int:
    async with open_channel(address) as channel:
        return int((await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status)


async def watch_health(cluster: Served, heard: set[int]) -> None:
    for address in itertools.cycle([cluster.address, cluster.prefill[0].address, cluster.decode[0].address]):
        heard.add(await health_of(address))
        await asyncio.sleep(0.05)


async def test_a_pool_of_two_requests_serves_thirty_two_in_line(tiny_model: Path) -> None:
    """Long and short, of every visibility and class, on both workers' smallest pools: no deadlock, nobody is left."""
    sizes = [120 if index % 5 == 0 else 20 + index for index in range(32)]
    priorities = ["low", "normal", "high"]
    rng = random.Random(5)
    asks = []
    for index, size in enumerate(sizes):
        request = ask([rng.randrange(3, 500) for _ in range(size)], MIXED[index % len(MIXED)], max_tokens=6 + index % 9)
        request.priority = priorities[index % 3]
        asks.append(request)
    needed = 4 * -(-(120 + 14) // 8)  # blocks of the longest, at full depth
    router = {"max_wait_s": 0.0}
    async with served(tiny_model, router=router, num_blocks=2 * needed, min_request_tokens=64) as cluster:
        heard: set[int] = set()
        watching = asyncio.create_task(watch_health(cluster, heard))
        alone = [(await cluster.completes(request))[0].output_ids for request in asks[:3]]
        answers = await asyncio.gather(*(cluster.completes(request) for request in asks))
        watching.cancel()
        assert [len(answer[0].output_ids) for answer in answers] == [6 + index % 9 for index in range(32)]
        assert [answer[0].output_ids for answer in answers[:3]] == alone
        assert heard == {SERVING}


async def one(cluster: Served, request: shoal_pb2.GenerateRequest) -> tuple[float | None, float | None]:
    """(Seconds to the first token, None), or (None, seconds to wait before the next try) of one that was refused."""
    started = time.monotonic()
    first = None
    try:
        async for _ in cluster.stub.Generate(request):
            first = first or time.monotonic() - started
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error.details()
        assert first is None and time.monotonic() - started < 1.0, "a refusal comes at once"
        assert "would wait about" in (error.details() or "")
        return None, float(dict(error.trailing_metadata() or ())["retry-after"])
    return first, None


async def test_three_times_the_load_is_refused_early_and_those_let_in_wait_no_longer_than_the_bound(tiny_model: Path) -> None:
    bound_s = 1.0
    router = {"max_wait_s": bound_s, "load_interval_s": 0.1}
    request = ask(list(range(3, 43)), "speed:2", stream=True, max_tokens=60)
    async with served(tiny_model, router=router, max_running_requests=3) as cluster:
        heard: set[int] = set()
        watching = asyncio.create_task(watch_health(cluster, heard))
        await asyncio.gather(*(one(cluster, request) for _ in range(3)))
        started = time.monotonic()
        await asyncio.gather(*(one(cluster, request) for _ in range(9)))
        capacity = 9 / (time.monotonic() - started)  # requests a second
        running = []
        for _ in range(round(3 * capacity * 4.0)):
            running.append(asyncio.create_task(one(cluster, request)))
            await asyncio.sleep(1 / (3 * capacity))
        outcomes = await asyncio.gather(*running)
        watching.cancel()
        ttfts = sorted(first for first, _ in outcomes if first is not None)
        waits = [retry for _, retry in outcomes if retry is not None]
        alone_s = ttfts[0]
        assert len(waits) > len(outcomes) // 3 and all(wait >= 1 for wait in waits)
        assert len(ttfts) > len(outcomes) // 6
        assert ttfts[int(0.95 * len(ttfts))] < 3 * bound_s + alone_s, (capacity, ttfts)  # unbounded: 8 s and growing
        assert heard == {SERVING}


async def test_a_worker_that_stalls_says_so_until_it_moves(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_step, stalls = step_loop.run_step, [True]

    def stalled(*arguments: Any) -> Any:
        while stalls[0]:
            time.sleep(0.02)
        return run_step(*arguments)

    monkeypatch.setattr(step_loop, "run_step", stalled)
    decode = make_config(Pool.DECODE, tiny_model, stall_timeout_s=0.8)
    async with in_process(make_config(Pool.PREFILL, tiny_model), decode) as (_, worker, prefill_end, decode_end):
        running = asyncio.create_task(generate(Ask(tuple(range(3, 43)), "full"), prefill_end, decode_end))
        await decode_end.until(Pool.DECODE, lambda load: load.num_running_reqs == 1)
        assert await health_of(worker.address) == SERVING
        await turns(worker.address, NOT_SERVING)
        stalls[0] = False
        assert len((await running).token_ids) == 6
        await turns(worker.address, SERVING)


async def test_full_of_what_nobody_holds_is_ill_and_full_of_running_requests_is_not(tiny_model: Path) -> None:
    decode = make_config(Pool.DECODE, tiny_model, stall_timeout_s=0.8, max_running_requests=2)
    async with in_process(make_config(Pool.PREFILL, tiny_model), decode) as (_, worker, prefill_end, decode_end):
        long = Ask(tuple(range(3, 43)), "full", max_tokens=400)
        asks = [asyncio.create_task(generate(long, prefill_end, decode_end)) for _ in range(4)]
        await decode_end.until(Pool.DECODE, lambda load: load.num_waiting_reqs == 2)
        while not all(task.done() for task in asks):
            assert await health_of(worker.address) == SERVING
            await asyncio.sleep(0.05)
        holdings = worker._loaded.reservations.holdings  # type: ignore[union-attr]
        layout, size = None, None
        original = holdings.reserve

        async def spy(*arguments: Any, **options: Any) -> Any:
            nonlocal layout, size
            layout, size = arguments[:2]
            return await original(*arguments, **options)

        holdings.reserve = spy  # type: ignore[method-assign]
        await generate(long, prefill_end, decode_end)
        leaked = [await original(layout, size, USUAL_TURN) for _ in range(2)]  # type: ignore[arg-type]
        waiting = asyncio.create_task(ends_with(generate(long, prefill_end, decode_end, timeout_s=20)))
        await turns(worker.address, NOT_SERVING)
        for holding in leaked:
            holdings.release(holding)
        await turns(worker.address, SERVING)
        waiting.cancel()


async def turns(address: str, status: int) -> None:
    """Wait until health is this."""
    async with asyncio.timeout(10):
        while await health_of(address) != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_two_routers_share_a_pool_by_its_reports(tiny_model: Path) -> None:
    """What one router lets in, the other one sees: it refuses though it has sent nothing."""
    request = ask(list(range(3, 43)), "full", max_tokens=250)
    async with served(tiny_model, router={"max_wait_s": 0.0}, max_running_requests=2) as cluster:
        workers = (f"prefill={cluster.prefill[0].address}", f"decode={cluster.decode[0].address}")
        visibilities = tuple(Visibility.parse(text) for text in MIXED)
        settings: dict[str, Any] = {"listen": "127.0.0.1:0", "visibilities": visibilities, "load_interval_s": 0.1}
        other = Router(RouterConfig(str(tiny_model), workers=workers, max_wait_s=0.05, **settings))
        async with open_channel(str(await other.start())) as channel:
            running = [asyncio.create_task(cluster.completes(request)) for _ in range(12)]
            await until(
                lambda: any(w.load.num_waiting_reqs >= 8 and w.load.mean_hold_s > 0.05 for w in other.registry.workers), 10
            )
            call = channel.unary_stream("/shoal.v1.Shoal/Generate", shoal_pb2.GenerateRequest.SerializeToString)
            with pytest.raises(grpc.aio.AioRpcError, match=r"2 of 2 places taken, \d+ requests before it wait"):
                async for _ in call(request):
                    pass
            assert all(len(answer[0].output_ids) == 250 for answer in await asyncio.gather(*running))
        await other.stop()
