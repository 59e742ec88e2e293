"""One transfer as the decode worker holds it, from reservation to Ack. Knows its attempt's fate and its sink."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.errors import Cancelled, ShoalError
from shoal.kv_transfer import metrics
from shoal.kv_transfer.actions import Finish
from shoal.kv_transfer.guard import Guard
from shoal.placement.plan import Entry, TransferPlan


class KvSink(Protocol):
    """Where a decode worker puts KV and deep states."""

    def unpack(self, entry: Entry, data: torch.Tensor) -> None:
        """Copy an entry out of `data` [entry.num_bytes] uint8, reused afterwards. On a transfer thread; must be quick."""
        ...


@dataclass(frozen=True, slots=True)
class ReceivedReport:
    """Counted at the pair channel, after the checksum was found right."""

    payload_bytes: int
    header_bytes: int  # control messages of this attempt, both directions
    num_entries: int
    seconds: float  # from the reservation to the Ack


class IncomingTransfer:
    """Made by TransferServer.expect. Its methods belong to the event loop."""

    def __init__(self, attempt_id: str, plan: TransferPlan, sink: KvSink, cancel: Callable[[str, ShoalError], None]) -> None:
        self.attempt_id = attempt_id
        self.guard = Guard()
        self.sink = sink
        self._cancel = cancel
        self._num_entries = len(plan.entries)
        self._started_s = time.monotonic()
        self._result: asyncio.Future[ReceivedReport] = asyncio.get_running_loop().create_future()
        self._result.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting

    async def wait(self) -> ReceivedReport:
        """Returns once every entry is in the sink, the checksum is right and the Ack is on its way.

        Raises Unavailable (peer, lease, checksum), Cancelled, Mismatch or InternalError. However it ends, the sink is not touched
        any more, and its blocks may be used or freed at once.
        """
        return await asyncio.shield(self._result)

    def cancel(self, reason: str) -> None:
        """This end no longer wants it. Idempotent. When it returns, `unpack` no longer runs and will not be called again."""
        self._cancel(self.attempt_id, Cancelled(reason))

    async def released(self) -> None:
        """Returns when the transfer has ended, however: its blocks may be freed."""
        await asyncio.wait([self._result])

    def finish(self, outcome: Finish) -> None:
        """The attempt has ended (called by its pair or server, once)."""
        self.guard.close()
        seconds = time.monotonic() - self._started_s
        if outcome.error is None:
            metrics.TRANSFERS.labels("received").inc()
            metrics.SECONDS.labels("received").observe(seconds)
            self._result.set_result(ReceivedReport(outcome.payload_bytes, outcome.header_bytes, self._num_entries, seconds))
        else:
            metrics.FAILURES.labels("received", type(outcome.error).__name__).inc()
            self._result.set_exception(outcome.error)
