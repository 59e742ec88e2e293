"""Runs one worker as a plain process, without Ray: configuration in, one line out when it serves, a drain on SIGTERM.

Knows no model and no pool. Used by tests and for running a worker by hand.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from shoal.config.logs import configure_worker_logging
from shoal.config.worker import WorkerConfig
from shoal.errors import InvalidConfig, ShoalError
from shoal.rpc.hosted import settle_heap
from shoal.rpc.tracing import configure_tracing

GRACE_S: Final = 30.0


class Startable(Protocol):
    """What both kinds of worker offer."""

    async def start(self) -> str: ...
    async def stop(self, grace_s: float) -> None: ...


def main(make_worker: Callable[[WorkerConfig], Startable], arguments: list[str]) -> int:
    """`arguments`: the path of a JSON file with WorkerConfig's fields. Returns the process's exit status."""
    try:
        if len(arguments) != 1:
            raise InvalidConfig("give one argument: a JSON file with the worker's configuration")
        try:
            values = json.loads(Path(arguments[0]).read_text())
        except (OSError, ValueError) as error:
            raise InvalidConfig(f"cannot read {arguments[0]}: {error}") from None
        config = WorkerConfig.from_dict(values)
        configure_worker_logging(config.worker_id)
        configure_tracing(config.worker_id)
        return asyncio.run(_serve(make_worker(config)))
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


async def _serve(worker: Startable) -> int:
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    address = await worker.start()
    settle_heap()
    print(json.dumps({"address": address}), flush=True)
    await asked_to_stop.wait()
    await worker.stop(GRACE_S)
    return 0
