"""One prefill worker, one decode worker and a router as plain processes, each held to cores of its own. No Ray, no restarts."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

from shoal.config.worker import Pool, WorkerConfig
from shoal.controller.descendants import die_with_parent
from shoal.router.main import SERVING


async def _spawn(arguments: Sequence[str], cpus: Collection[int]) -> asyncio.subprocess.Process:
    def begin() -> None:
        die_with_parent()
        os.sched_setaffinity(0, cpus)

    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=begin,
    )


async def _line(process: asyncio.subprocess.Process, timeout_s: float = 60.0) -> str:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
    if not line:
        raise RuntimeError(f"a process of the cluster ended with status {await process.wait()}")
    return line.decode().strip()


@contextlib.asynccontextmanager
async def pinned_cluster(
    prefill: WorkerConfig, decode: WorkerConfig, *, prefill_cpus: Collection[int], decode_cpus: Collection[int],
    router_cpus: Collection[int], router_arguments: Sequence[str] = (),
) -> AsyncIterator[str]:  # fmt: skip
    """The router's address, once both workers serve. Nothing is left behind."""
    started: list[asyncio.subprocess.Process] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            addresses = []
            for config, cpus in ((prefill, prefill_cpus), (decode, decode_cpus)):
                path = Path(folder) / f"{config.worker_id}.json"
                path.write_text(json.dumps(config.to_dict()))
                started.append(await _spawn(["-m", f"shoal.{config.pool}_worker", str(path)], cpus))
            for config, process in zip((prefill, decode), started, strict=True):
                addresses.append(f"{config.pool}={json.loads(await _line(process))['address']}")
            visibilities = ",".join(map(str, prefill.allowed_visibilities))
            arguments = [
                "-m",
                "shoal.router",
                "--model",
                prefill.model,
                "--listen",
                "127.0.0.1:0",
                "--visibilities",
                visibilities,
                "--local-prefill-tokens",
                "0",
            ]
            for address in addresses:
                arguments += ["--worker", address]
            arguments += router_arguments
            started.append(await _spawn([*arguments, "--log-level", "warning"], router_cpus))
            line = await _line(started[-1])
            while await _line(started[-1]) != SERVING:
                continue
            yield line.rpartition(" ")[2]
        finally:
            for process in reversed(started):
                if process.returncode is None:
                    process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 15)
                if process.returncode is None:
                    process.kill()
                    await process.wait()


def workers(model: str, dtype: str, visibilities: Sequence[str], **changes: object) -> tuple[WorkerConfig, WorkerConfig]:
    """Equal configurations of a prefill and a decode worker, as `shoal serve` would give them."""
    common = {"model": model, "dtype": dtype, "allowed_visibilities": list(visibilities), "kv_memory_bytes": 512 << 20} | changes
    made = [WorkerConfig.from_dict({"worker_id": f"{pool}-0", "pool": str(pool), **common}) for pool in Pool]
    return made[0], made[1]
