"""The prefill side's front door: opens transfers, makes and keeps pairs. Knows targets and pairs; knows no messages.

One per prefill worker, on its event loop. Pairs are made on first use or by `prewarm`, bounded, evicted when idle, and each is
torn down alone. A pair that failed is made anew, with a new epoch, on its next use.
"""

import asyncio
import time
from contextvars import Context
from dataclasses import dataclass, replace

from shoal.config.transfer import SHARED_MEMORY, TransferConfig
from shoal.engine.shared_memory import SharedMemory
from shoal.errors import Cancelled, CapacityExceeded, InternalError, Unavailable
from shoal.kv_transfer.backends import make_backend
from shoal.kv_transfer.dial import Connect, DecodeTarget
from shoal.kv_transfer.faults import Faults
from shoal.kv_transfer.handle import Handle
from shoal.kv_transfer.lending import offered
from shoal.kv_transfer.outgoing import KvSource, OutgoingTransfer
from shoal.kv_transfer.outgoing_pair import OutgoingPair, SenderShared
from shoal.kv_transfer.staging import Gate, StagingPool
from shoal.pb.internal.v1 import transfer_pb2 as pb
from shoal.placement.plan import TransferPlan
from shoal.rpc.channel import open_channel
from shoal.rpc.fingerprints import fingerprint_to_pb
from shoal.types import Fingerprint


@dataclass(frozen=True, slots=True)
class _Slot:
    pair: OutgoingPair
    started: asyncio.Task[None]


class TransferClient:
    """Opens transfers to decode workers. Construct and use it on the event loop; raises InvalidConfig for a bad backend."""

    def __init__(
        self,
        *,
        worker_id: str,
        epoch: int,
        fingerprint: Fingerprint,
        config: TransferConfig,
        backend: str | None = None,  # overrides the configuration's
        faults: Faults | None = None,
        connect: Connect = open_channel,
        memory: SharedMemory | None = None,  # in which the worker's pool lies
    ) -> None:
        config = replace(config, backend=backend) if backend else config
        self._fingerprint = fingerprint
        self._config = config
        channels = make_backend(config)
        if (channels.name == SHARED_MEMORY) is not (memory is not None):
            raise InternalError(f"transfer.backend {channels.name} and a pool in shared memory belong together, or neither")
        self._shared = SenderShared(
            config=config,
            backend=channels,
            staging=StagingPool(config.num_staging_buffers, config.max_entry_bytes, channels.device, "sent"),
            sends=Gate(channels.max_outstanding),
            faults=faults or Faults(),
            connect=connect,
            memory=memory,
        )
        self._worker_id = worker_id
        self._epoch = epoch
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._parting: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def num_pairs(self) -> int:
        """Pairs that are up or being made."""
        return sum(slot.pair.error is None for slot in self._slots.values())

    @property
    def num_staging_in_use(self) -> int:
        return self._shared.staging.num_in_use

    @property
    def num_staging_quarantined(self) -> int:
        return self._shared.staging.num_quarantined

    async def open(self, target: DecodeTarget, handle: Handle, plan: TransferPlan, source: KvSource) -> OutgoingTransfer:
        """Start a transfer and wait for decode's Accept.

        Raises Mismatch (fingerprint, visibility, plan), Cancelled (the attempt has ended), Unavailable, CapacityExceeded (pairs).
        """
        if not plan.entries or plan.digest != handle.plan_digest:
            raise InternalError("a transfer needs a plan with entries, and a handle made from that plan")
        largest = max(entry.num_bytes for entry in plan.entries)
        if largest > self._config.max_entry_bytes:
            raise InternalError(
                f"the plan has an entry of {largest} bytes; transfer.max_entry_bytes is {self._config.max_entry_bytes}"
            )
        pair = await self._pair(target)
        transfer = pair.open(handle, plan, source)
        try:
            await asyncio.shield(transfer.accepted)
        except asyncio.CancelledError:
            transfer.cancel("the caller stopped waiting for Accept")
            raise
        return transfer

    async def prewarm(self, target: DecodeTarget) -> None:
        """Make the pair before its first transfer. Raises as `open` does."""
        await self._pair(target)

    async def close(self) -> None:
        """End every transfer and pair; returns when every issued send has returned."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for key in list(self._slots):
            self._drop(key, Unavailable("the prefill worker is shutting down"))
        if self._parting:  # bounded: a peer that hung while the group was being made holds its thread until it dies
            config = self._config
            await asyncio.wait(
                set(self._parting), timeout=config.connect_timeout_s + config.message_timeout_s(config.max_entry_bytes)
            )

    async def _pair(self, target: DecodeTarget) -> OutgoingPair:
        if self._closed:
            raise Unavailable("the prefill worker is shutting down")
        key = (target.worker_id, target.epoch)
        slot = self._slots.get(key)
        if slot is None or slot.pair.error is not None:
            slot = self._make(key, target)
        await asyncio.shield(slot.started)
        if slot.pair.error is not None:
            raise slot.pair.error
        return slot.pair

    def _make(self, key: tuple[str, int], target: DecodeTarget) -> _Slot:
        for old in list(self._slots):
            if self._slots[old].pair.error is not None:
                self._drop(old, Unavailable("the pair had closed"))
        if len(self._slots) >= self._config.max_pairs:
            idle = [old for old, slot in self._slots.items() if slot.started.done() and slot.pair.is_idle]
            if not idle:
                raise CapacityExceeded(f"all {self._config.max_pairs} pairs are busy; retry, or raise transfer.max_pairs")
            self._drop(
                min(idle, key=lambda old: self._slots[old].pair.used_s), Cancelled("evicted to make room for another pair")
            )
        pair = OutgoingPair(target, self._shared)
        hello = pb.Hello(
            worker_id=self._worker_id,
            epoch=self._epoch,
            fingerprint=fingerprint_to_pb(self._fingerprint),
            decode_worker_id=target.worker_id,
            decode_epoch=target.epoch,
            backend=self._shared.backend.name,
            pool=offered(self._shared.memory) if self._shared.memory is not None else None,
        )
        started = asyncio.create_task(pair.start(hello), context=Context())  # a pair is no request's: its lines carry no ids
        started.add_done_callback(lambda task: self._started(key, task))
        slot = self._slots[key] = _Slot(pair, started)
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep(), context=Context())
        return slot

    def _started(self, key: tuple[str, int], task: "asyncio.Task[None]") -> None:
        """A pair is up, or could not be made: whoever waits hears it too.

        Only now is its epoch known to be true. Believing a caller's word for it would let one wrong task end the good pair.
        """
        if task.cancelled() or task.exception() is not None:
            return
        for old in [old for old in self._slots if old[0] == key[0] and old[1] < key[1]]:
            self._drop(old, Unavailable(f"decode worker {key[0]} has been restarted"))

    def _drop(self, key: tuple[str, int], error: Cancelled | Unavailable) -> None:
        slot = self._slots.pop(key)
        slot.pair.close(error)
        slot.started.cancel()
        parting = asyncio.create_task(slot.pair.torn_down())
        self._parting.add(parting)
        parting.add_done_callback(self._parting.discard)

    async def _sweep(self) -> None:
        """Tear down what is idle or has closed, also when no transfer comes."""
        while True:
            await asyncio.sleep(self._config.pair_idle_s / 4)
            for key, slot in list(self._slots.items()):
                idle_s = time.monotonic() - slot.pair.used_s
                if slot.pair.error is not None:
                    self._drop(key, Unavailable("the pair had closed"))
                elif slot.started.done() and slot.pair.is_idle and idle_s > self._config.pair_idle_s:
                    self._drop(key, Cancelled(f"idle for {idle_s:.0f} s"))
