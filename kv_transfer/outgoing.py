"""One transfer as the prefill worker holds it. Knows its attempt's fate and its source; knows nothing of other transfers."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.engine.shared_memory import Lease
from shoal.errors import Cancelled, ShoalError
from shoal.kv_transfer import metrics
from shoal.kv_transfer.actions import Finish
from shoal.kv_transfer.gathering import Gathering
from shoal.kv_transfer.guard import Guard
from shoal.kv_transfer.lending import Lends
from shoal.placement.plan import Entry, TransferPlan


class KvSource(Lends, Protocol):
    """Where a prefill worker's KV and deep states lie. `tables` and `states` are asked only where that is shared memory."""

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
    """Made by TransferClient.open. Its methods belong to the event loop, but for those that say otherwise.

    A step loop says `begin_step`, `complete` as layers finish, and `end_step`; whoever has no steps says `entries_ready`.
    """

    def __init__(
        self,
        attempt_id: str,
        source: KvSource,
        plan: TransferPlan,
        max_gathered_bytes: int,
        pair: "TransferOwner",
        lease: Lease | None = None,
    ) -> None:
        self.attempt_id = attempt_id
        self.guard = Guard()
        self.source = source
        self.gathering = Gathering(
            plan,
            self.guard,
            source.pack,
            max_gathered_bytes,
            in_place=lease is not None,
            filled=self._filled,
            ready=self.entries_ready,
        )
        self._loop = asyncio.get_running_loop()
        self._pair = pair
        self.lease = lease  # of shared memory, in which decode reads in place
        self.is_lent = False  # decode has been told where everything lies
        self._num_entries = len(plan.entries)
        self._started_s = time.monotonic()
        self.accepted: asyncio.Future[None] = self._loop.create_future()
        self._result: asyncio.Future[SentReport] = self._loop.create_future()
        for future in (self.accepted, self._result):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting

    def begin_step(self) -> None:
        """A step is about to complete entries: it gets a staging buffer to pack them into, if there is one to spare."""
        self.gathering.begin_step()
        self._pair.lend(self)

    def complete(self, indices: Sequence[int]) -> None:
        """The bytes of these entries exist, each told once. Any thread; in a step's they are packed before it returns."""
        self.gathering.complete(indices)

    def is_worth(self, num_bytes: int) -> bool:
        """Whether something would leave if so many bytes more were complete. Any thread."""
        return self.gathering.is_worth(num_bytes)

    def end_step(self) -> None:
        """The step is over: what is complete leaves. Any thread."""
        self.gathering.end_step()

    def entries_ready(self, indices: Sequence[int]) -> None:
        """The bytes of these entries exist, each told once, and are to leave now. Any thread. Harmless after the end."""
        self._loop.call_soon_threadsafe(self._pair.entries_ready, self.attempt_id, tuple(indices))

    def _filled(self, ticket: int, entries: Sequence[Entry], crcs: Sequence[int] | None, error: ShoalError | None) -> None:
        self._loop.call_soon_threadsafe(self._pair.filled, self, ticket, entries, crcs, error)

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
        self.gathering.withdraw()
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

    def lend(self, transfer: OutgoingTransfer) -> None: ...

    def filled(
        self,
        transfer: OutgoingTransfer,
        ticket: int,
        entries: Sequence[Entry],
        crcs: Sequence[int] | None,
        error: ShoalError | None,
    ) -> None: ...

    def cancel(self, attempt_id: str, error: ShoalError) -> None: ...
