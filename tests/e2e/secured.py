"""A router and its workers as processes of their own, with whatever security a test asks for."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.config.tls import ClusterConfig
from shoal.config.worker import Pool
from tests.e2e.harness import MIXED, make_config, processes

_SOURCE = str(Path(__file__).resolve().parents[2] / "src")


@dataclass(frozen=True)
class System:
    """Addresses and processes, the router's first."""

    grpc: str
    http: str
    workers: tuple[str, str]  # prefill, decode
    pids: tuple[int, ...]

    def listening(self) -> list[dict[int, str]]:
        """The ports that each process and its children listen on, with their hosts."""
        return [listening(process, *process.children(recursive=True)) for process in map(psutil.Process, self.pids)]


def listening(*processes: psutil.Process) -> dict[int, str]:
    """Every listening socket of these processes: its port and host."""
    sockets = [connection for process in processes for connection in process.net_connections("inet")]
    return {c.laddr.port: c.laddr.ip.removeprefix("::ffff:") for c in sockets if c.status == psutil.CONN_LISTEN}


@asynccontextmanager
async def system(folder: Path, model: Path, *router_flags: object, cluster: ClusterConfig | None = None) -> AsyncIterator[System]:
    """One worker of each pool and a router that can serve. `router_flags` are those of its doors."""
    cluster = cluster or ClusterConfig()
    configs = [make_config(pool, model, cluster=cluster, prefix_cache=False) for pool in Pool]  # every answer crosses
    async with processes(folder, *configs) as workers:
        flags: list[object] = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--model", model]
        flags += ["--visibilities", ",".join(MIXED), "--drain-s", 1, "--local-prefill-tokens", 0, *router_flags]
        for worker in workers:
            flags += ["--worker", f"{worker.pool}={worker.endpoint.address}"]
        names = {
            "secret-file": cluster.secret_file,
            "tls-cert": cluster.certificate,
            "tls-key": cluster.key,
            "tls-ca": cluster.ca,
        }
        for name, value in names.items():
            flags += [f"--cluster-{name}", value] if value else []
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "shoal.router", *map(str, flags),
            stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": _SOURCE},
        )  # fmt: skip
        try:
            told = await asyncio.wait_for(_lines(process), 60)
            grpc, http = (str(re.search(pattern, told)[1]) for pattern in (r"listening on (\S+)", r"HTTP on (\S+)"))  # type: ignore[index]
            addresses = tuple(worker.endpoint.address for worker in workers)
            yield System(grpc, http, addresses, (process.pid, *(worker.process.pid for worker in workers)))  # type: ignore[arg-type]
        finally:
            if process.returncode is None:
                process.terminate()
            await asyncio.wait_for(process.wait(), 20)


async def _lines(process: asyncio.subprocess.Process) -> str:
    """What the router prints until it can serve."""
    assert process.stdout is not None
    told = ""
    while "can serve" not in told:
        line = await process.stdout.readline()
        assert line, f"the router ended: {told}"
        told += line.decode()
    return told
