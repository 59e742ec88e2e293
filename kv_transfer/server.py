"""The decode side's front door: the gRPC servicer, reservations, leases. Knows attempts and pairs; knows no messages' content.

One per decode worker, on its event loop; the decode worker mounts it on its own server with `add_TransferServicer_to_server`.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc

from shoal.config.transfer import SHARED_MEMORY, TransferConfig
from shoal.errors import Cancelled, CapacityExceeded, InternalError, InvalidRequest, Mismatch, ShoalError, Unavailable
from shoal.kv_transfer import metrics, wire
from shoal.kv_transfer.actions import Finish
from shoal.kv_transfer.attempts import AttemptBook
from shoal.kv_transfer.backends import make_backend
from shoal.kv_transfer.faults import Faults
from shoal.kv_transfer.handle import Handle
from shoal.kv_transfer.incoming import IncomingTransfer, KvSink
from shoal.kv_transfer.incoming_pair import IncomingPair, ReceiverShared
from shoal.kv_transfer.lending import Borrower
from shoal.kv_transfer.staging import Gate, Permits, StagingPool
from shoal.pb.internal.v1 import transfer_pb2 as pb
from shoal.pb.internal.v1 import transfer_pb2_grpc
from shoal.placement.plan import TransferPlan
from shoal.rpc.fingerprints import fingerprint_from_pb
from shoal.types import Fingerprint, ModelShape

ControlContext = grpc.aio.ServicerContext[pb.SenderMessage, pb.ReceiverMessage]


class TransferServer(transfer_pb2_grpc.TransferServicer):
    """Receives transfers. Construct and use it on the event loop; raises InvalidConfig for a bad host or backend."""

    def __init__(
        self,
        *,
        worker_id: str,
        epoch: int,
        fingerprint: Fingerprint,
        config: TransferConfig,
        backend: str | None = None,  # overrides the configuration's
        faults: Faults | None = None,
        shape: ModelShape | None = None,  # of the model, where KV is read from shared memory
    ) -> None:
        config = replace(config, backend=backend) if backend else config
        self._worker_id = worker_id
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._config = config
        self._shape = shape
        channels = make_backend(config)
        staging = StagingPool(config.num_staging_buffers, config.max_entry_bytes, channels.device, "received")
        self._shared = ReceiverShared(
            config=config,
            backend=channels,
            staging=staging,
            permits=Permits(Gate(channels.max_outstanding), staging),
            faults=faults or Faults(),
            book=AttemptBook(lease_s=config.lease_s, remember_s=config.max_deadline_s),
            transfers={},
            owners={},
            finish=self._finish,
        )
        self._pairs: dict[str, IncomingPair] = {}  # by the prefill worker's id
        self._parting: set[asyncio.Task[None]] = set()
        self._sweeper = asyncio.create_task(self._sweep())
        self._closed = False

    @property
    def num_pairs(self) -> int:
        return len(self._pairs)

    @property
    def num_expected(self) -> int:
        """Reservations that have not ended, accepted or not."""
        return len(self._shared.transfers)

    @property
    def num_staging_in_use(self) -> int:
        return self._shared.staging.num_in_use

    @property
    def num_staging_quarantined(self) -> int:
        return self._shared.staging.num_quarantined

    def expect(self, attempt_id: str, handle: Handle, plan: TransferPlan, sink: KvSink) -> IncomingTransfer:
        """A reservation was made: accept this attempt when a prefill worker opens it.

        Raises AlreadyExists for an id that is known, Mismatch when handle and plan disagree, Unavailable when shutting down.
        """
        if self._closed:
            raise Unavailable("the decode worker is shutting down")
        if not plan.entries or handle.attempt_id != attempt_id:
            raise InternalError("a transfer needs a plan with entries and a handle with its own attempt id")
        largest = max(entry.num_bytes for entry in plan.entries)
        if largest > self._config.max_entry_bytes:
            raise InternalError(
                f"the plan has an entry of {largest} bytes; transfer.max_entry_bytes is {self._config.max_entry_bytes}"
            )
        wire.check_fingerprints(handle.fingerprint, self._fingerprint)
        self._shared.book.expect(handle, plan, time.monotonic())
        transfer = self._shared.transfers[attempt_id] = IncomingTransfer(attempt_id, plan, sink, self._cancel)
        return transfer

    async def Control(self, request_iterator: AsyncIterator[pb.SenderMessage], context: ControlContext) -> None:
        """The pair's control stream. Its end, however it comes, is the pair's end."""
        try:
            pair = await self._meet(request_iterator, context)
        except ShoalError as refusal:
            await context.write(wire.rejection("", refusal))
            return
        reader = asyncio.create_task(self._read(request_iterator, pair))
        try:
            await pair.closing.wait()
            await pair.part()
        finally:
            pair.close(Unavailable(f"prefill worker {pair.worker_id} is gone: its control stream ended"))
            pair.stop()
            reader.cancel()
            if self._pairs.get(pair.worker_id) is pair:
                del self._pairs[pair.worker_id]

    async def close(self) -> None:
        """End every attempt and pair; returns when every posted receive has returned."""
        self._closed = True
        self._sweeper.cancel()
        error = Unavailable("the decode worker is shutting down")
        for pair in list(self._pairs.values()):
            pair.close(error)
        for attempt_id in list(self._shared.transfers):
            self._cancel(attempt_id, error)
        if self._parting:  # bounded: a peer that hung while the group was being made holds its thread until it dies
            config = self._config
            await asyncio.wait(
                set(self._parting), timeout=config.connect_timeout_s + config.message_timeout_s(config.max_entry_bytes)
            )

    async def _meet(self, request_iterator: AsyncIterator[pb.SenderMessage], context: ControlContext) -> IncomingPair:
        faults = self._shared.faults
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                message = await anext(request_iterator, None)
        except TimeoutError:
            raise Unavailable(f"no Hello within {self._config.connect_timeout_s:g} s") from None
        if message is None or message.WhichOneof("message") != "hello":
            raise InternalError("a control stream begins with Hello")
        await faults.reach("on-hello")
        hello = message.hello
        self._check(hello)
        borrower = self._borrower(hello)
        old = self._pairs.get(hello.worker_id)
        if old is not None:
            old.close(Unavailable(f"prefill worker {hello.worker_id} made a new pair"))
        elif len(self._pairs) >= self._config.max_pairs:
            idle = [pair for pair in self._pairs.values() if pair.is_idle]
            if not idle:
                raise CapacityExceeded(f"all {self._config.max_pairs} pairs are busy; retry, or raise transfer.max_pairs")
            oldest = min(idle, key=lambda pair: pair.used_s)
            del self._pairs[oldest.worker_id]
            oldest.close(Cancelled("evicted to make room for another pair"))
        pair = self._pairs[hello.worker_id] = IncomingPair(hello, context.write, self._shared, borrower)
        parting = asyncio.create_task(pair.torn_down())
        self._parting.add(parting)
        parting.add_done_callback(self._parting.discard)
        return pair

    def _borrower(self, hello: pb.Hello) -> Borrower | None:
        if self._shared.backend.name != SHARED_MEMORY:
            return None
        if self._shape is None:
            raise InternalError("a decode worker that reads shared memory needs the model's shape")
        return Borrower(hello.pool, self._shape, self._fingerprint)

    def _check(self, hello: pb.Hello) -> None:
        if self._closed:
            raise Unavailable("the decode worker is shutting down")
        if not 0 < len(hello.worker_id) <= wire.MAX_ID_CHARACTERS:
            raise InvalidRequest(f"a worker id has 1 … {wire.MAX_ID_CHARACTERS} characters, not {len(hello.worker_id)}")
        if (hello.decode_worker_id, hello.decode_epoch) != (self._worker_id, self._epoch):
            raise Unavailable(
                f"this is decode worker {self._worker_id} epoch {self._epoch}, not {hello.decode_worker_id} epoch "
                f"{hello.decode_epoch}: the sender's address is stale"
            )
        old = self._pairs.get(hello.worker_id)
        if old is not None and old.epoch > hello.epoch:
            raise Unavailable(f"prefill worker {hello.worker_id} epoch {hello.epoch} was replaced by epoch {old.epoch}")
        if hello.backend != self._shared.backend.name:
            raise Mismatch(
                f"transfer.backend: {hello.backend} at prefill != {self._shared.backend.name} at decode; set both alike"
            )
        wire.check_fingerprints(fingerprint_from_pb(hello.fingerprint), self._fingerprint)

    async def _read(self, request_iterator: AsyncIterator[pb.SenderMessage], pair: IncomingPair) -> None:
        try:
            async for message in request_iterator:
                await pair.on_message(message)
        finally:
            pair.close(Unavailable(f"prefill worker {pair.worker_id} ended its control stream"))

    def _cancel(self, attempt_id: str, error: ShoalError) -> None:
        owner = self._shared.owners.get(attempt_id)
        if owner is not None:
            owner.cancel(attempt_id, error)
        elif attempt_id in self._shared.transfers:
            self._finish(Finish(attempt_id, error, 0, 0))

    def _finish(self, outcome: Finish) -> None:
        self._shared.book.end(outcome.attempt_id, time.monotonic())
        self._shared.owners.pop(outcome.attempt_id, None)
        self._shared.transfers.pop(outcome.attempt_id).finish(outcome)

    async def _sweep(self) -> None:
        """Expire reservations that nobody opened, also when nothing else happens."""
        while True:
            await asyncio.sleep(min(self._config.heartbeat_s, self._config.lease_s / 4))
            for attempt_id in self._shared.book.sweep(time.monotonic()):
                metrics.EXPIRED.inc()
                self._cancel(attempt_id, Unavailable(f"no prefill worker opened the transfer within {self._config.lease_s:g} s"))
