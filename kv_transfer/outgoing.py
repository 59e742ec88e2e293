"""One transfer as the prefill worker holds it. Knows its attempt's fate and its source; knows nothing of other transfers."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.errors import Cancelled, ShoalError
from shoal.kv_transfer import metrics
from shoal.kv_transfer.actions import Finish
from shoal.kv_transfer.guard import Guard
from shoal.placement.plan import Entry


class KvSource(Protocol):
    """Where a prefill worker's KV and deep states lie."""

    def pack(self, entry: Entry, out: torch.Tensor) -> None:
        """Copy an entry into `out` [entry.num_bytes] uint8, in its wire layout. Called from a transfer thread; must be quick."""
        ...


@dataclass(frozen=True, slots=True)
class SentReport:
    """Counted at the pair channel, after the Ack."""

    payload_bytes: int
    header_bytes: int  # control messages of this attempt, both directions
    num_entries: int
    seconds: float  # from Open to Ack


class OutgoingTransfer:
    """Made by TransferClient.open. Its methods belong to the event loop, but for `entries_ready`."""

    def __init__(self, attempt_id: str, source: KvSource, num_entries: int, pair: "TransferOwner") -> None:
        self.attempt_id = attempt_id
        self.guard = Guard()
        self.source = source
        self._loop = asyncio.get_running_loop()
        self._pair = pair
        self._num_entries = num_entries
        self._started_s = time.monotonic()
        self.accepted: asyncio.Future[None] = self._loop.create_future()
        self._result: asyncio.Future[SentReport] = self._loop.create_future()
        for future in (self.accepted, self._result):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting

    def entries_ready(self, indices: Sequence[int]) -> None:
        """The bytes of these entries exist. Thread-safe; called by the step loop as layers finish, each entry once.

        Harmless after the transfer has ended.
        """
        self._loop.call_soon_threadsafe(self._pair.entries_ready, self.attempt_id, tuple(indices))

    async def wait(self) -> SentReport:
        """Returns once decode has acknowledged. Raises Unavailable, Cancelled, Mismatch or InternalError."""
        return await asyncio.shield(self._result)

    def cancel(self, reason: str) -> None:
        """Give the transfer up. Idempotent. When it returns, `pack` no longer runs and will not be called again."""
        self._pair.cancel(self.attempt_id, Cancelled(reason))

    async def released(self) -> None:
        """Returns when the source's blocks may be freed: sends in flight read staging only, `pack` is not called again."""
        await asyncio.wait([self._result])

    def finish(self, outcome: Finish) -> None:
        """The attempt has ended (called by its pair, once)."""
        self.guard.close()
        seconds = time.monotonic() - self._started_s
        if outcome.error is None:
            metrics.TRANSFERS.labels("sent").inc()
            metrics.SECONDS.labels("sent").observe(seconds)
            self._result.set_result(SentReport(outcome.payload_bytes, outcome.header_bytes, self._num_entries, seconds))
            return
        metrics.FAILURES.labels("sent", type(outcome.error).__name__).inc()
        self._result.set_exception(outcome.error)
        if not self.accepted.done():
            self.accepted.set_exception(outcome.error)


class TransferOwner(Protocol):
    """What a transfer needs of its pair."""

    def entries_ready(self, attempt_id: str, indices: Sequence[int]) -> None: ...

    def cancel(self, attempt_id: str, error: ShoalError) -> None: ...
