"""Starts transfer peers and talks to them. Knows the peers' JSON lines; knows nothing of the transfer's insides."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# small messages and short timeouts: a torn receive is given up after 0.8 s plus its bytes at 16 MB/s
CONFIG: dict[str, Any] = {
    "max_entry_bytes": 1 << 20, "max_entry_tokens": 1024, "heartbeat_s": 0.25, "heartbeat_misses": 3, "base_timeout_s": 0.8,
    "connect_timeout_s": 5.0, "lease_s": 5.0,
}  # fmt: skip


class PeerFailed(Exception):
    """A command failed in the peer: `kind` is the error's class name."""

    def __init__(self, kind: str, words: str, seconds: float) -> None:
        super().__init__(f"{kind}: {words}")
        self.kind, self.words, self.seconds = kind, words, seconds


class PeerProcess:
    """One prefill or decode process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())
        self.pid = 0
        self.target: list[Any] = []
        self.died = asyncio.Event()
        self.died_s = 0.0

    def call(self, do: str, **arguments: Any) -> "asyncio.Future[Any]":
        """Send a command now; await the result. Raises PeerFailed, or ConnectionError when the process dies first."""
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        if self.died.is_set():
            future.set_exception(ConnectionError("the peer is dead"))
        self._writer.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
        return future

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def settled(self, within_s: float, why: str = "", **wanted: int) -> dict[str, Any]:
        """Wait until the peer's state shows these values, all zero by default."""
        wanted = {"in_use": 0, "quarantined": 0, "expected": 0, **wanted}
        deadline = time.monotonic() + within_s
        while True:
            state: dict[str, Any] = await self.call("state")
            if all(state[name] == value for name, value in wanted.items()):
                assert not state["late_unpacks"], "the sink was touched after its blocks had been freed"
                return state
            assert time.monotonic() < deadline, f"{why}: after {within_s} s still {state}, wanted {wanted}"
            await asyncio.sleep(0.05)

    def hang_up(self) -> None:
        self._writer.close()
        self._reading.cancel()

    async def death(self) -> float:
        """When the process died, on this process's monotonic clock."""
        await self.died.wait()
        return self.died_s

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                reply = json.loads(line)
                future = self._waiting.pop(reply["id"])
                if "error" in reply:
                    future.set_exception(PeerFailed(reply["error"], reply["words"], reply["seconds"]))
                else:
                    future.set_result(reply["result"])
        except ConnectionError:
            pass
        finally:
            self.died_s = time.monotonic()
            self.died.set()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ConnectionError("the peer died"))
                    future.exception()


class Lab:
    """Makes peers from one pre-imported parent process."""

    def __init__(self, path: str) -> None:
        self._path = path

    @asynccontextmanager
    async def peer(
        self,
        role: str,
        worker_id: str,
        epoch: int = 1,
        *,
        backend: str = "gloo",
        fingerprint: dict[str, Any] | None = None,
        faults: dict[str, Any] | None = None,
        **config: Any,
    ) -> AsyncIterator[PeerProcess]:
        peer = PeerProcess(*await asyncio.open_unix_connection(self._path))
        try:
            arguments = {
                "config": {**CONFIG, "backend": backend, **config},
                "fingerprint": fingerprint or {},
                "faults": faults or {},
            }
            started = await peer.call("start", role=role, worker_id=worker_id, epoch=epoch, **arguments)
            peer.pid, peer.target = started["pid"], started.get("target", [])
            yield peer
        finally:
            if peer.pid and not peer.died.is_set():
                os.kill(peer.pid, signal.SIGKILL)
            peer.hang_up()


@contextmanager
def running_lab() -> Iterator[Lab]:
    """A parent process that has imported torch and gRPC once."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/lab"
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "GRPC_VERBOSITY": "ERROR"}
        command = [sys.executable, str(Path(__file__).with_name("transfer_peer.py")), path]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None and process.stdout.readline() == b"ready\n"
                yield Lab(path)
            finally:
                process.kill()


async def transfer(prefill: PeerProcess, decode: PeerProcess, attempt: str, tokens: int = 2048, **send: Any) -> tuple[dict, dict]:
    """One whole transfer; returns what both ends report."""
    seed = zlib.crc32(attempt.encode())
    await decode.call("expect", attempt=attempt, seed=seed, tokens=tokens)
    receiving = decode.call("receive", attempt=attempt)
    sent = await prefill.call("send", target=decode.target, attempt=attempt, seed=seed, tokens=tokens, **send)
    received = await receiving
    assert sent["payload_bytes"] == received["payload_bytes"] == sent["plan_bytes"] and not received["wrong"], (sent, received)
    return sent, received
