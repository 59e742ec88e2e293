"""The part of a worker's process that its controller talks to: start with progress, describe, stop, lifeline. Knows no Ray.

A Ray actor class derives from it; everything that crosses is text or serialised protobuf.
"""

import asyncio
import ctypes
import gc
import json
import logging
import os
import socket
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Protocol

from shoal.config.logs import configure_worker_logging
from shoal.config.worker import NODE, Pool, WorkerConfig
from shoal.errors import ShoalError
from shoal.pb.internal.v1 import worker_pb2
from shoal.rpc.address import Address
from shoal.rpc.metrics_http import serve_metrics
from shoal.rpc.tracing import configure_tracing

_log = logging.getLogger(__name__)


def process_host() -> str:
    """Where a pid means something: the machine, and on Linux the pid namespace."""
    try:
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def settle_heap() -> None:
    """When all is loaded: leave what lives as long as the process out of later garbage collections, and give back the rest.

    Beside torch a full one walks 300,000 objects and stops every stream of a worker for 160 ms. Dequantising leaves 150 to 200 MB
    of SmolLM2-135M with the allocator; glibc gives it back when asked (other C libraries are not asked).
    """
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


class Worker(Protocol):
    """What PrefillWorker and DecodeWorker offer. `start` returns the bound `host:port`."""

    async def start(self) -> str: ...
    async def stop(self, grace_s: float) -> None: ...
    def describe(self) -> worker_pb2.WorkerDescription: ...


class HostedWorker:
    """One worker in one process. `config_text` is WorkerConfig.to_dict() as JSON."""

    pool: ClassVar[Pool]

    def __init__(self, config_text: str) -> None:
        config = WorkerConfig.from_dict(json.loads(config_text))
        self._config = config.placed_at(self.node_host()) if config.host == NODE else config
        configure_worker_logging(self._config.worker_id)
        configure_tracing(self._config.worker_id)
        self._config_text = config_text
        self._progress: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._worker: Worker | None = None
        self._started = False

    def __repr__(self) -> str:
        return f"{self._config.worker_id} epoch {self._config.epoch}"

    def node_host(self) -> str:
        """The address of the node that this process was placed on, in place of NODE."""
        raise NotImplementedError

    def make_worker(self, config: WorkerConfig) -> Worker:
        """Build the worker; `report_progress` may be handed to it."""
        raise NotImplementedError

    async def start(self) -> AsyncIterator[str]:
        """Start the worker. Yields JSON texts: {"loading": [done, total]} …, then {"ready": hex of a WorkerDescription, "pid": …}
        or {"failed": error class, "message": …} when the configuration can never work."""
        self._loop = asyncio.get_running_loop()
        starting = asyncio.create_task(self._start())
        while not starting.done():
            change = asyncio.create_task(self._progress.get())
            await asyncio.wait((starting, change), return_when=asyncio.FIRST_COMPLETED)
            if change.done():
                yield json.dumps({"loading": change.result()})
            else:
                change.cancel()
        try:
            await starting
        except ShoalError as error:
            _log.error("cannot start: %s", error)
            yield json.dumps({"failed": type(error).__name__, "message": str(error)})
        else:
            yield self._ready_text()

    async def _start(self) -> None:
        self._worker = self.make_worker(self._config)
        await self._worker.start()
        settle_heap()
        if listen := os.environ.get("SHOAL_METRICS_LISTEN"):
            address = Address.parse(listen, "SHOAL_METRICS_LISTEN")
            serve_metrics(Address(self._config.host, address.port) if address.host == NODE else address, self._config.cluster)
        self._started = True

    @property
    def is_ready(self) -> bool:
        """Started and not stopped."""
        return self._started

    def report_progress(self, done: int, total: int) -> None:
        """Bytes of weights loaded so far. Callable from any thread."""
        self._loop.call_soon_threadsafe(self._progress.put_nowait, (done, total))

    async def describe(self) -> str:
        """The last text of `start`, for a controller that adopts a running actor; {} while it is not ready."""
        return self._ready_text() if self._started else "{}"

    async def stop(self, grace_s: float) -> None:
        """Drain and stop. Harmless before and after."""
        if self._worker is not None and self._started:
            self._started = False
            await self._worker.stop(grace_s)

    async def lifeline(self) -> None:
        """Never returns: whoever awaits it learns of this process's death at once."""
        await asyncio.Event().wait()

    def _ready_text(self) -> str:
        assert self._worker is not None
        ready: dict[str, Any] = {
            "ready": self._worker.describe().SerializeToString().hex(),
            "pid": os.getpid(),
            "host": process_host(),
            "machine": os.environ.get("POD_NAME")
            or socket.gethostname(),  # a pod's host name is its own, unless it shares its node's
            "config": self._config_text,
        }
        return json.dumps(ready)
