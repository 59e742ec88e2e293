"""A real cluster to be hurt: `shoal serve` over a Ray of its own or one started here, and who its processes are."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from shoal.cli.preflight import free_port
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import open_channel
from tests.e2e.conftest import Cluster, start_serve

ROUTER, CONTROLLER = "router", "controller"
_MODULES = {ROUTER: "shoal.router", CONTROLLER: "shoal.launch.controller"}


@dataclass(frozen=True, slots=True)
class Ident:
    """A process, told from a later one with the same pid."""

    pid: int
    created_s: float

    def find(self) -> psutil.Process | None:
        """The process, unless it is gone."""
        try:
            process = psutil.Process(self.pid)
            gone = process.create_time() != self.created_s or process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return None
        return None if gone else process


@contextmanager
def own_ray(folder: Path, num_cpus: int) -> Iterator[dict[str, str]]:
    """A Ray that outlives controllers; yields the environment that joins it (with RAY_ADDRESS for our own use)."""
    port = free_port("127.0.0.1")
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", f"--num-cpus={num_cpus}"]
    command += [f"--object-store-memory={80 << 20}", "--include-dashboard=false", "--disable-usage-stats", "--block"]
    log = folder / "ray.log"
    with log.open("w") as stream:
        head = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | environment
        )
    below: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 90
        while "--block" not in log.read_text():
            if head.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start\n{log.read_text()}")
            time.sleep(0.1)
        yield environment | {"SHOAL_CHAOS_RAY": f"127.0.0.1:{port}"}
    finally:
        if head.poll() is None:
            below = psutil.Process(head.pid).children(recursive=True)
            head.terminate()
            head.wait(30)
        for process in psutil.wait_procs(below, timeout=5)[1]:
            process.kill()


class Victims:
    """The running cluster: what the router says of it, and the process behind each name."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.address = cluster.address
        self._channel = open_channel(cluster.address)
        self._stub = shoal_pb2_grpc.ShoalStub(self._channel)

    async def close(self) -> None:
        await self._channel.close(None)

    async def workers(self, timeout_s: float = 2.0) -> dict[str, shoal_pb2.WorkerInfo]:
        """As the router lists them now, by id. Raises grpc.aio.AioRpcError."""
        reply = await self._stub.GetServerInfo(shoal_pb2.GetServerInfoRequest(), timeout=timeout_s)
        return {worker.worker_id: worker for worker in reply.workers}

    async def loads(self, timeout_s: float = 5.0) -> dict[str, shoal_pb2.WorkerLoad]:
        """Of every worker that answers. Raises grpc.aio.AioRpcError."""
        reply = await self._stub.GetLoads(shoal_pb2.GetLoadsRequest(), timeout=timeout_s)
        return {load.worker_id: load for load in reply.loads}

    async def num_active(self) -> int:
        """Requests that the router runs. Raises grpc.aio.AioRpcError."""
        reply = await self._stub.GetServerInfo(shoal_pb2.GetServerInfoRequest(), timeout=2.0)
        return int(reply.active_requests)

    async def idents(self) -> dict[str, Ident]:
        """Every process of the cluster by name: shoal serve, router, controller, workers, and Ray's own."""
        workers = {int(w.address.rpartition(":")[2]): name for name, w in (await self.workers()).items() if w.state == "ready"}
        return await asyncio.to_thread(self._idents, workers)

    def _idents(self, worker_ports: dict[int, str]) -> dict[str, Ident]:
        found = {"serve": _ident(self._cluster.process.pid)}
        for name, module in _MODULES.items():
            found[name] = _ident(self._cluster.child(module).pid)
        found |= {p.name(): _ident(p.pid) for p in self._cluster.descendants() if p.name() in ("gcs_server", "raylet")}
        for connection in psutil.net_connections("tcp"):
            if not connection.laddr or connection.status != psutil.CONN_LISTEN or connection.pid is None:
                continue
            if (worker := worker_ports.get(connection.laddr.port)) is not None:
                found[worker] = _ident(connection.pid)
                for parent in psutil.Process(connection.pid).parents():
                    if parent.name() == "raylet":
                        found["raylet"] = _ident(parent.pid)
        return found

    def one(self, name: str) -> Ident:
        """The process of the router or the controller now. Raises StopIteration while there is none."""
        return _ident(self._cluster.child(_MODULES[name]).pid)

    def dead_at(self, worker_id: str, epoch: int, offset: int) -> float | None:
        """When the controller wrote, after this place of the log, that a worker is dead; in seconds of the wall clock."""
        needle = f"{worker_id} epoch {epoch} is dead"
        for line in self._cluster.log.read_bytes()[offset:].decode(errors="replace").splitlines():
            at = line.find('{"time"') if needle in line else -1
            if at >= 0:
                return datetime.fromisoformat(json.loads(line[at:])["time"]).timestamp()
        return None

    def num_adopted_since(self, offset: int) -> int:
        """How many workers a controller has said, after this place of the log, that it took over."""
        return self._cluster.log.read_bytes()[offset:].count(b" adopted, epoch")

    @property
    def log_size(self) -> int:
        return self._cluster.log.stat().st_size


def _ident(pid: int) -> Ident:
    return Ident(pid, psutil.Process(pid).create_time())


@contextmanager
def running(arguments: list[str], folder: Path, *, own: bool, faults: dict[str, object]) -> Iterator[Cluster]:
    """A cluster of two prefill and two decode workers until the end of the block, then stopped; nothing stays."""
    arguments = [*arguments, "--prefill-workers", "2", "--decode-workers", "2", "--log-format", "json"]
    environment: dict[str, str] = {"SHOAL_FAULTS": json.dumps(faults)} if faults else {}
    arguments += ["--chaos"] if faults else []
    if own:
        with own_ray(folder, 4) as ray:
            address = ray.pop("SHOAL_CHAOS_RAY")
            with _serving([*arguments, "--ray-address", address], folder, environment | ray) as cluster:
                yield cluster
    else:
        with _serving(arguments, folder, environment) as cluster:
            yield cluster


@contextmanager
def _serving(arguments: list[str], folder: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    cluster = start_serve(arguments, folder / "serve.log", environment)
    try:
        yield cluster
    finally:
        if cluster.process.poll() is None:
            cluster.stop()
