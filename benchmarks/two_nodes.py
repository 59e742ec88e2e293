"""A cluster over two Ray nodes, each in a network namespace: prefill in one, decode in the other, the router in a third.

    router ──┐
             ├─ hub ── prefill   Ray's head, labelled pool=prefill, and the controller (a Ray driver, which needs a node)
    decode ──┘
      Ray node, labelled pool=decode

All three planes cross the hub: Ray between the nodes, gRPC from router and controller to the workers, KV from prefill to decode.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.netns import Net
from benchmarks.pinned_cluster import line_of, process
from shoal.cli.cluster_secret import new_secret
from shoal.router.main import SERVING

PLACES = ("prefill", "decode", "router")
RAY_PORT, CONTROLLER_PORT, ROUTER_PORT = 6379, 50050, 50051
START_S = 150.0


def ray_start(net: Net, pool: str, folder: Path) -> list[str]:
    """`ray start …` of a pool's node, as Python's arguments."""
    head = f"{net.addresses['prefill']}:{RAY_PORT}"
    where = (
        ["--head", f"--port={RAY_PORT}", f"--temp-dir={folder}", "--include-dashboard=false"]
        if pool == "prefill"
        else [f"--address={head}"]
    )
    return [
        *("-m", "ray.scripts.scripts", "start", *where, f"--node-ip-address={net.addresses[pool]}", "--labels", f"pool={pool}"),
        *("--num-cpus=1", "--object-store-memory=83886080", "--disable-usage-stats", "--block"),
    ]


def serve_config(net: Net, model: str, visibilities: Sequence[str], **changes: Any) -> dict[str, Any]:
    """What the controller is told: the keys of `shoal serve`."""
    return {
        "model": model,
        "visibilities": list(visibilities),
        "ray_address": f"{net.addresses['prefill']}:{RAY_PORT}",
        "controller_listen": f"{net.addresses['prefill']}:{CONTROLLER_PORT}",
        "pool_labels": True,
        "worker_host": "node",
    } | changes


@contextlib.asynccontextmanager
async def two_nodes(net: Net, model: str, visibilities: Sequence[str], log: Path, **changes: Any) -> AsyncIterator[str]:
    """The router's address, which only this network reaches, once it serves. Whatever runs in the namespaces ends with it."""
    everywhere = os.sched_getaffinity(0)
    # short: Ray's sockets live there, and a path of theirs holds 107 bytes
    with tempfile.TemporaryDirectory(prefix="shoal-net-", dir="/tmp") as name, log.open("ab") as words:
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(_end_what_is_left, net)
            folder = Path(name)
            secret = new_secret(folder / "secret")
            environment = os.environ | {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_COLOR_PREFIX": "0",
            }
            config = serve_config(net, model, visibilities, cluster_secret_file=str(secret), **changes)

            async def run(place: str, arguments: Sequence[str], until: str) -> None:
                there = process(arguments, everywhere, net.command(place), env=environment, stderr=words)
                started = await stack.enter_async_context(there)
                async with asyncio.timeout(START_S):
                    while until not in await line_of(started, START_S):
                        pass
                stack.push_async_callback(_cancel, asyncio.create_task(_drain(started)))

            await run("prefill", ray_start(net, "prefill", folder / "ray"), "Ray runtime started")
            await run("decode", ray_start(net, "decode", folder / "ray"), "Ray runtime started")
            controller = ["-m", "shoal.launch.controller", "--listen", config["controller_listen"]]
            await run("prefill", [*controller, "--config-text", json.dumps(config)], '"all-ready"')
            address = f"{net.addresses['router']}:{ROUTER_PORT}"
            router = ["-m", "shoal.router", "--listen", address, "--controller", config["controller_listen"], "--model", model]
            router += ["--visibilities", ",".join(visibilities), "--cluster-secret-file", str(secret)]
            await run("router", [*router, "--local-prefill-tokens", "0"], SERVING)
            yield address


async def _drain(started: asyncio.subprocess.Process) -> None:
    """A process whose output nobody reads would stop one day."""
    assert started.stdout is not None
    while await started.stdout.readline():
        pass


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _end_what_is_left(net: Net) -> None:
    """Nobody but us lives in these namespaces."""
    for place in PLACES:
        told = subprocess.run(["ip", "netns", "pids", net.name(place)], capture_output=True, text=True, check=False)
        for pid in map(int, told.stdout.split()):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
