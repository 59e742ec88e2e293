"""The decode end of one pair: carries out the receiver machine's actions. Knows this pair's stream, threads and staging."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shoal.config.transfer import TransferConfig
from shoal.errors import InternalError, Mismatch, ShoalError, Unavailable
from shoal.kv_transfer import actions as act
from shoal.kv_transfer import metrics, wire
from shoal.kv_transfer.attempts import AttemptBook
from shoal.kv_transfer.backends import DECODE_RANK, Backend
from shoal.kv_transfer.control import ControlStream, receiver_beat
from shoal.kv_transfer.faults import Faults
from shoal.kv_transfer.incoming import IncomingTransfer
from shoal.kv_transfer.lane import Lane
from shoal.kv_transfer.lending import Borrower, Loan
from shoal.kv_transfer.perform import Performer
from shoal.kv_transfer.receiver import ReceiverMachine
from shoal.kv_transfer.rendezvous import PairStore
from shoal.kv_transfer.staging import Permits, StagingBuffer, StagingPool
from shoal.pb.internal.v1 import transfer_pb2 as pb
from shoal.placement.plan import Entry

logger = logging.getLogger(__name__)
_PARTING_S = 0.5  # for the last words on a stream that is being closed


@dataclass(frozen=True, slots=True)
class ReceiverShared:
    """What the pairs of one decode worker share."""

    config: TransferConfig
    backend: Backend
    staging: StagingPool
    permits: Permits
    faults: Faults
    book: AttemptBook
    transfers: dict[str, IncomingTransfer]  # every expected attempt
    owners: dict[str, "IncomingPair"]  # the pair that carries an accepted attempt
    finish: Callable[[act.Finish], None]


class IncomingPair:
    """One control stream and one channel from one prefill worker. Every method belongs to the event loop."""

    def __init__(
        self,
        hello: pb.Hello,
        write: Callable[[pb.ReceiverMessage], Awaitable[object]],
        shared: ReceiverShared,
        borrower: Borrower | None = None,
    ) -> None:
        self.worker_id: str = hello.worker_id
        self.epoch: int = hello.epoch
        self.used_s = time.monotonic()
        self.error: ShoalError | None = None  # why it closed
        self.closing = asyncio.Event()
        self._shared = shared
        self._borrower = borrower
        self._loans: dict[str, Loan] = {}  # by attempt
        self._machine = ReceiverMachine(
            shared.book,
            max_receives=shared.config.max_receives_in_flight,
            max_joined_bytes=shared.backend.max_joined_bytes,
        )
        self._perform = Performer(self._carry_out)
        self._granted: StagingBuffer | None = None
        self._buffers: dict[int, StagingBuffer] = {}  # by n
        self._placed: set[int] = set()  # messages that hold a place on the device
        self._stream = ControlStream[pb.ReceiverMessage](
            end="received",
            write=write,
            faults=shared.faults,
            heartbeat_s=shared.config.heartbeat_s,
            peer_timeout_s=shared.config.peer_timeout_s,
            beat=receiver_beat,
            on_tick=lambda now: None,
            on_silent=self.close,
        )
        welcome = pb.Welcome(heartbeat_s=shared.config.heartbeat_s)
        self._stream.put(pb.ReceiverMessage(welcome=welcome))
        backend, timeout_s = shared.backend, shared.config.connect_timeout_s
        self._loop = asyncio.get_running_loop()
        store = self._store = PairStore(self._tell, timeout_s)
        self._lane = Lane(f"kv-from-{self.worker_id}", lambda: backend.connect(store, DECODE_RANK, timeout_s), shared.faults)
        self._lane.connected.add_done_callback(self._on_connected)
        metrics.PAIRS.labels("received").inc()
        logger.info("pair from prefill worker %s, epoch %d", self.worker_id, self.epoch)

    @property
    def is_idle(self) -> bool:
        """No attempt lives and no message holds a buffer."""
        return not self._machine.num_attempts and not self._buffers

    async def on_message(self, message: pb.SenderMessage) -> None:
        """A message of the control stream, after Hello."""
        if await self._stream.heard(message) or self.error is not None:
            return
        kind = message.WhichOneof("message")
        if kind == "end" and not message.end.attempt_id:
            self.close(Unavailable(f"prefill worker {self.worker_id} closed the pair: {message.end.reason}"))
        elif kind == "rendezvous":
            try:
                self._store.heard(message.rendezvous.key, message.rendezvous.value)
            except InternalError as error:
                self.close(error)
        elif kind != "heartbeat":
            self.used_s = time.monotonic()
            if kind == "ready" and message.ready.HasField("lent"):
                self._take_loan(message.ready)
            self._perform(self._machine.on_message(message))

    def cancel(self, attempt_id: str, error: ShoalError) -> None:
        """Give one of this pair's attempts up. Harmless when repeated."""
        self._perform(self._machine.cancel(attempt_id, error))

    def close(self, error: ShoalError) -> None:
        """End every attempt now; buffers with a posted receive stay quarantined until it returns. Idempotent."""
        if self.error is not None:
            return
        self.error = error
        self._perform(self._machine.closed(error))
        self._shared.permits.withdraw(self)
        self._store.close(error)
        self._lane.close(error, self._release_places)
        metrics.PAIRS.labels("received").dec()
        metrics.PAIR_FAILURES.labels("received", type(error).__name__).inc()
        logger.info("pair from prefill worker %s closed: %s", self.worker_id, error)
        self.closing.set()

    async def part(self) -> None:
        """Tell the peer why, for a moment, if it still listens."""
        error = self.error or Unavailable("the pair has closed")
        await self._stream.finish(wire.rejection("", error), _PARTING_S)

    def stop(self) -> None:
        """Write nothing more."""
        self._stream.stop()

    async def torn_down(self) -> None:
        """Returns when the group is gone and every posted receive has returned."""
        await self._lane.closed.wait()
        self._borrower = None  # not some day with a cycle of references: it holds a whole KV pool of a worker that may be dead

    def _tell(self, key: str, value: bytes) -> None:
        """Called on a thread of the lane."""
        message = pb.ReceiverMessage(rendezvous=pb.Rendezvous(key=key, value=value))
        self._loop.call_soon_threadsafe(self._stream.put, message)

    def _on_connected(self, connected: "asyncio.Future[None]") -> None:
        error = connected.exception()
        if isinstance(error, ShoalError):
            self.close(error)

    def _carry_out(self, action: act.Action) -> None:
        match action:
            case act.Write(message=pb.ReceiverMessage() as message):
                self._stream.put(message)
            case act.WantBuffer():
                if self.error is None:
                    self._shared.permits.request(self, self._grant)
            case act.ReturnBuffer():
                self._shared.permits.release_place()
                self._shared.permits.release_buffer(self._take_granted())
            case act.Post():
                self._buffers[action.n] = self._take_granted()
                self._placed.add(action.n)
                if self._borrower is not None:
                    self._borrow(action, self._borrower)
                else:
                    self._post(action)
            case act.FreeBuffer():
                self._leave_place(action.key)
                self._shared.permits.release_buffer(self._buffers.pop(action.key))
            case act.Quarantine():
                self._shared.staging.quarantine(self._buffers[action.key])
            case act.Accepted():
                self._shared.owners[action.attempt_id] = self
            case act.Finish():
                self._loans.pop(action.attempt_id, None)
                self._shared.finish(action)
            case act.Skipped():
                metrics.SKIPPED.inc(action.num_bytes)
            case act.Rejected():
                metrics.REJECTS.labels(type(action.error).__name__).inc()
            case act.ClosePair():
                self.close(action.error)
            case _:
                raise InternalError(f"the decode end cannot carry out {type(action).__name__}")

    def _grant(self, buffer: StagingBuffer) -> None:
        self._granted = buffer
        self._perform(self._machine.granted())

    def _take_granted(self) -> StagingBuffer:
        buffer, self._granted = self._granted, None
        if buffer is None:
            raise InternalError("a buffer was used that had not been granted")
        return buffer

    def _take_loan(self, ready: pb.Ready) -> None:
        if self._borrower is None or self._shared.owners.get(ready.attempt_id) is not self:
            return  # an attempt that has ended; what comes of it is not read
        try:
            self._loans[ready.attempt_id] = self._borrower.loan(ready.lent)
        except ShoalError as error:
            self.close(_without_frames(error))

    def _borrow(self, action: act.Post, borrower: Borrower) -> None:
        """Read a message's entries where prefill has them, in the lane's thread."""
        n, loan, memory = action.n, self._loans.get(action.attempt_id), self._buffers[action.n].memory
        transfer, lane = self._shared.transfers.get(action.attempt_id), self._lane

        def done(crcs: list[int] | None, error: ShoalError | None) -> None:
            self._perform(self._machine.posted(n))
            metrics.PAYLOAD.labels("received").inc(action.num_bytes)
            self._perform(self._machine.arrived(n, action.num_bytes))
            self._perform(self._machine.unpacked(n, crcs, error))

        def job() -> None:
            crcs: list[int] | None = None
            failure: ShoalError | None = None
            try:
                self._shared.faults.hit("before-post")
                if loan is None:
                    raise Mismatch("prefill announced a message before it said where the attempt's KV lies")
                if transfer is not None and self._read(borrower, loan, action.entries, memory, transfer):
                    crcs = [0] * len(action.entries)
            except Exception as error:  # noqa: BLE001  # the attempt's end; the thread must outlive it
                crcs, failure = None, _without_frames(error)
            lane.report(done, crcs, failure)

        if self.error is not None:
            self._perform(self._machine.failed(n))
        else:
            lane.run(job)

    def _read(
        self, borrower: Borrower, loan: Loan, entries: Sequence[Entry], memory: torch.Tensor, transfer: IncomingTransfer
    ) -> bool:
        """One entry after the other, so that each is unpacked while it lies in the cache. False: the transfer has ended."""
        for entry in entries:
            part = borrower.read(loan, entry, memory)
            self._shared.faults.hit("after-receive")
            if not transfer.guard.call(partial(transfer.sink.unpack, entry, part)):
                return False
            self._shared.faults.hit("after-unpack")
        return True

    def _post(self, action: act.Post) -> None:
        n, num_bytes = action.n, action.num_bytes
        if self.error is not None:
            self._perform(self._machine.failed(n))
            return
        transfer = self._shared.transfers.get(action.attempt_id)
        view = self._buffers[n].view(num_bytes)
        faults, lane = self._shared.faults, self._lane

        def arrived_on_thread(num_bytes: int) -> None:
            lane.report(arrived, num_bytes)
            try:
                crcs = transfer.guard.copy(transfer.sink.unpack, action.entries, view) if transfer is not None else None
                faults.hit("after-unpack")
            except ShoalError as error:
                lane.report(unpacked, None, error)
            else:
                lane.report(unpacked, crcs, None)

        def arrived(num_bytes: int) -> None:
            metrics.PAYLOAD.labels("received").inc(num_bytes)
            self._leave_place(n)
            self._perform(self._machine.arrived(n, num_bytes))

        def unpacked(crcs: list[int] | None, error: ShoalError | None) -> None:
            self._perform(self._machine.unpacked(n, crcs, error))

        def failed(error: ShoalError) -> None:
            self._perform(self._machine.failed(n))
            self.close(error)

        lane.receive(
            n,
            view,
            self._shared.config.message_timeout_s(num_bytes),
            posted=lambda: self._perform(self._machine.posted(n)),
            arrived=arrived_on_thread,
            failed=failed,
        )

    def _leave_place(self, n: int) -> None:
        if n in self._placed:
            self._placed.discard(n)
            self._shared.permits.release_place()

    def _release_places(self) -> None:
        """The channel has been aborted: what it had posted no longer occupies the device."""
        for n in list(self._placed):
            self._leave_place(n)


def _without_frames(error: Exception) -> ShoalError:
    """As Shoal's own. What it came through holds the borrowed pool, and whoever keeps the error would keep that."""
    if not isinstance(error, ShoalError):
        return InternalError(f"reading KV failed: {type(error).__name__}: {error}")
    error.__context__ = None
    return error.with_traceback(None)
