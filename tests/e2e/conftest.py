"""Starts real clusters with `shoal serve` and stops them, checking each time that no process stays behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
import pytest

from shoal.cli.preflight import free_port
from shoal.model_files import write_random_model
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import open_sync_channel

START_TIMEOUT_S = 150.0


@dataclass
class Cluster:
    """A running `shoal serve`."""

    process: subprocess.Popen[str]
    address: str
    log: Path
    output: list[str] = field(default_factory=list)

    def server_info(self) -> shoal_pb2.GetServerInfoResponse:
        with open_sync_channel(self.address) as channel:
            return shoal_pb2_grpc.ShoalStub(channel).GetServerInfo(shoal_pb2.GetServerInfoRequest(), timeout=5)

    def loads(self) -> dict[str, shoal_pb2.WorkerLoad]:
        with open_sync_channel(self.address) as channel:
            loads = shoal_pb2_grpc.ShoalStub(channel).GetLoads(shoal_pb2.GetLoadsRequest(), timeout=5).loads
        return {load.worker_id: load for load in loads}

    def workers(self) -> dict[str, shoal_pb2.WorkerInfo]:
        return {worker.worker_id: worker for worker in self.server_info().workers}

    def wait_until_idle(self, timeout_s: float = 10.0) -> dict[str, shoal_pb2.WorkerLoad]:
        """Loads, once no block, reservation or staging buffer is in use."""
        return self.wait_for(
            lambda: (
                (loads := self.loads())
                and not any(load.num_used_blocks or load.num_reservations or load.num_staging_in_use for load in loads.values())
                and loads
            ),
            timeout_s,
        )

    def wait_for(self, look: Callable[[], object], timeout_s: float = 30.0) -> object:
        """What `look` returns, once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (seen := look()):
            assert time.monotonic() < deadline, f"not within {timeout_s} s; the log ends with\n{self.log_tail()}"
            assert self.process.poll() is None, f"shoal serve ended\n{self.log_tail()}"
            time.sleep(0.05)
        return seen

    def worker_process(self, worker_id: str) -> psutil.Process:
        """The process that listens at a worker's address."""
        port = int(self.workers()[worker_id].address.rpartition(":")[2])
        for process in self.descendants():
            try:
                listening = [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            except psutil.Error:
                continue
            if port in listening:
                return process
        raise AssertionError(f"no process of {worker_id} listens on {port}")

    def child(self, module: str) -> psutil.Process:
        """The process of `python -m <module>`; the controller's guardian, which it was forked from, is not it."""
        processes = [p for p in self.descendants() if module in " ".join(_command(p))]
        return next(p for p in processes if not any(other.ppid() == p.pid for other in processes))

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def log_tail(self) -> str:
        return self.log.read_text()[-3000:]

    def stop(self, number: int = signal.SIGTERM, expected_status: int | None = 0) -> None:
        """Signal `shoal serve`, wait, and see that it left nothing."""
        before = self.descendants() if self.process.poll() is None else []
        self.process.send_signal(number)
        try:
            status = self.process.wait(60)
        finally:
            _, left = psutil.wait_procs(before, timeout=3)
            for process in left:
                process.kill()
        assert not left, f"left behind: {[process.name() for process in left]}"
        if expected_status is not None:
            assert status == expected_status, f"status {status}\n{self.log_tail()}"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def command_environment(state: Path | None = None) -> dict[str, str]:
    """Of commands of this checkout; `state`: where a cluster keeps what other commands find it by."""
    source = str(Path(__file__).parents[2] / "src")
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH", ""))))
    return os.environ | {"PYTHONPATH": path} | ({"XDG_STATE_HOME": str(state)} if state is not None else {})


def spawn_serve(arguments: list[str], log: IO[str], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`shoal serve` as its own process, output piped, log lines into a file."""
    command = [sys.executable, "-c", "from shoal.cli.serve import serve; serve()", *arguments]
    variables = command_environment() | (environment or {})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables)


def start_serve(arguments: list[str], log: Path, environment: dict[str, str] | None = None) -> Cluster:
    """Start and wait for the ready line."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    with log.open("w") as stream:
        own_state = {"XDG_STATE_HOME": str(log.parent)}  # where secrets are kept
        split = [] if "--colocated" in arguments else ["--local-prefill-tokens", "0"]  # tests' prompts are short
        process = spawn_serve(["--listen", address, *split, *arguments], stream, own_state | (environment or {}))
    cluster = Cluster(process, address, log)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            cluster.output.append(line)
            if line.startswith("ready:"):
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    if not ready.wait(START_TIMEOUT_S) or process.poll() is not None or not cluster.output:
        cluster.stop(signal.SIGTERM, expected_status=None)
        raise AssertionError(f"shoal serve did not become ready\n{cluster.log_tail()}")
    return cluster


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, random weights, 1,024 tokens of context."""
    return write_random_model(tmp_path_factory.mktemp("tiny"), max_context=1024)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Start clusters; each is stopped when the module is done, or earlier by the test."""
    clusters: list[Cluster] = []

    def start(*arguments: str, environment: dict[str, str] | None = None) -> Cluster:
        log = tmp_path_factory.mktemp("serve") / "serve.log"
        clusters.append(start_serve(list(arguments), log, environment))
        return clusters[-1]

    yield start
    for cluster in clusters:
        if cluster.process.poll() is None:
            cluster.stop()
