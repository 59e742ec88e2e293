"""Starts the null worker and a router in front of it, and measures each door. Knows processes; prints nothing."""

import asyncio
import json
import os
from contextlib import AsyncExitStack
from typing import Final

from benchmarks.pinned_cluster import line_of, pinned_router, process
from benchmarks.router.doors import Door, Grpc, Http, Worker
from benchmarks.router.measure import Cost, Programme, cpu_s, measure
from shoal.simulator.calibration.measure import Told

DOORS: Final = ("grpc", "http")
_IDLE_S: Final = 3.0


async def run(
    model: str, router_cpu: int | None, programme: Programme, doors: tuple[str, ...], told: Told
) -> tuple[list[Cost], float]:
    """(Figures, the share of a core that the idle router takes). With a core for the router, worker and client get the others."""
    cpus = os.sched_getaffinity(0)
    mine, routers = (cpus, cpus) if router_cpu is None else (cpus - {router_cpu}, {router_cpu})
    os.sched_setaffinity(0, mine)
    total, costs = len(programme.streams) * len(doors), list[Cost]()
    async with AsyncExitStack() as stack:
        told("starting", 0, total)
        worker = await stack.enter_async_context(process(["-m", "benchmarks.router.null_worker", model], mine))
        address = json.loads(await line_of(worker))["address"]
        more = ("--http-listen", "127.0.0.1:0", "--max-wait-s", "0")
        router = await stack.enter_async_context(pinned_router(model, "full", [f"decode={address}"], routers, more))
        direct = await stack.enter_async_context(Worker(address))
        made: dict[str, Door] = {
            "grpc": await stack.enter_async_context(Grpc(router.address)),
            "http": await stack.enter_async_context(Http(router.http_address)),
        }
        before_s = cpu_s(router.pid)
        await asyncio.sleep(_IDLE_S)
        idle = (cpu_s(router.pid) - before_s) / _IDLE_S
        for name in doors:
            for streams in programme.streams:
                told(f"{name}, {streams} streams", len(costs), total)
                costs.append(await measure(name, direct, made[name], router.pid, streams, programme))
    os.sched_setaffinity(0, cpus)
    return costs, idle
