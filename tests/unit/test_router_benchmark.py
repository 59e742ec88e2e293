"""The router benchmark over real gRPC and HTTP: each door gives every token, at the rate asked for, and its cost is counted."""

import asyncio
import os
import time

from benchmarks.router.doors import Grpc, Http, Worker
from benchmarks.router.measure import Programme, cpu_s, measure
from benchmarks.router.null_worker import NullDecodeWorker
from shoal.config.router import RouterConfig
from shoal.router.app import Router


async def test_every_door_is_measured() -> None:
    worker = NullDecodeWorker("smollm2-135m")
    await worker.start()
    address = worker.description.address
    config = RouterConfig(
        "smollm2-135m", "127.0.0.1:0", "127.0.0.1:0", workers=(f"decode={address}",), max_wait_s=0.0
    )  # fmt: skip
    router = Router(config)
    try:
        grpc_address = str(await router.start())
        await asyncio.wait_for(router.has_served.wait(), 10)
        async with Worker(address) as direct, Grpc(grpc_address) as grpc, Http(str(router.http_address)) as http:
            for door in (direct, grpc, http):
                assert 0 < await door.stream(5) < 5
                assert await door.whole(5, rate=50) > 4 / 50
            cost = await measure("http", direct, http, os.getpid(), 2, Programme(probes=3, paced_tokens=2, fast_tokens=50))
    finally:
        await router.stop(0.0)
        await worker.stop()
    assert (cost.door, cost.streams) == ("http", 2)
    assert cost.fast_us_per_token > 0 and cost.tokens_per_core_s > 0 and cost.fast_tokens_per_s > 0


def test_cpu_seconds_are_those_of_the_process() -> None:
    before, own = cpu_s(os.getpid()), time.process_time()
    while time.process_time() < own + 0.05:
        continue
    assert 0.04 < cpu_s(os.getpid()) - before < 5
