"""One prefill worker, one decode worker and a router as plain processes, each held to cores of its own. No Ray, no restarts."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.config.worker import Pool, WorkerConfig
from shoal.controller.descendants import die_with_parent
from shoal.router.main import SERVING


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router process. `http_address` is "" without an HTTP door."""

    address: str
    http_address: str
    pid: int


@contextlib.asynccontextmanager
async def process(
    arguments: Sequence[str], cpus: Collection[int], launcher: Sequence[str] = (), **more: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Python with these arguments on these cores, its output a pipe; it ends with us. `launcher` starts it elsewhere."""

    def begin() -> None:
        die_with_parent()
        os.sched_setaffinity(0, cpus)

    started = await asyncio.create_subprocess_exec(
        *launcher, sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, preexec_fn=begin, **more
    )  # fmt: skip
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(started.wait(), 15)
        if started.returncode is None:
            started.kill()
            await started.wait()


async def line_of(process: asyncio.subprocess.Process, timeout_s: float = 60.0) -> str:
    """The next line it prints. Raises RuntimeError when it ends instead."""
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
    if not line:
        raise RuntimeError(f"a process of the cluster ended with status {await process.wait()}")
    return line.decode().strip()


@contextlib.asynccontextmanager
async def pinned_router(
    model: str, visibilities: str, worker_addresses: Sequence[str], cpus: Collection[int], more: Sequence[str] = ()
) -> AsyncIterator[RunningRouter]:
    """A router over workers (pool=host:port), once it can serve."""
    arguments = ["-m", "shoal.router", "--model", model, "--visibilities", visibilities, "--log-level", "warning"]
    arguments += ["--listen", "127.0.0.1:0", "--local-prefill-tokens", "0"]
    for address in worker_addresses:
        arguments += ["--worker", address]
    async with process([*arguments, *more], cpus) as started:
        told: dict[str, str] = {}
        while (line := await line_of(started)) != SERVING:
            what, _, address = line.rpartition(" ")
            told[what] = address
        yield RunningRouter(told["router listening on"], told.get("router serving HTTP on", ""), started.pid)


@contextlib.asynccontextmanager
async def pinned_cluster(
    prefill: WorkerConfig, decode: WorkerConfig, *, prefill_cpus: Collection[int], decode_cpus: Collection[int],
    router_cpus: Collection[int], router_arguments: Sequence[str] = (),
) -> AsyncIterator[str]:  # fmt: skip
    """The router's address, once both workers serve. Nothing is left behind."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        started = []
        for config, cpus in ((prefill, prefill_cpus), (decode, decode_cpus)):
            path = Path(folder) / f"{config.worker_id}.json"
            path.write_text(json.dumps(config.to_dict()))
            started.append(await stack.enter_async_context(process(["-m", f"shoal.{config.pool}_worker", str(path)], cpus)))
        addresses = [
            f"{config.pool}={json.loads(await line_of(one))['address']}"
            for config, one in zip((prefill, decode), started, strict=True)
        ]
        visibilities = ",".join(map(str, prefill.allowed_visibilities))
        router = pinned_router(prefill.model, visibilities, addresses, router_cpus, router_arguments)
        yield (await stack.enter_async_context(router)).address


def workers(model: str, dtype: str, visibilities: Sequence[str], **changes: object) -> tuple[WorkerConfig, WorkerConfig]:
    """Equal configurations of a prefill and a decode worker, as `shoal serve` would give them."""
    common = {"model": model, "dtype": dtype, "allowed_visibilities": list(visibilities), "kv_memory_bytes": 512 << 20} | changes
    made = [WorkerConfig.from_dict({"worker_id": f"{pool}-0", "pool": str(pool), **common}) for pool in Pool]
    prefill, decode = (replace(each, transfer=each.transfer.within(each.token_budget)) for each in made)
    return prefill, decode
