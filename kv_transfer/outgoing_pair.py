"""The prefill end of one pair: carries out the sender machine's actions. Knows this pair's stream, threads and staging."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.config.transfer import TransferConfig
from shoal.engine.shared_memory import SharedMemory
from shoal.errors import InternalError, ShoalError, Unavailable
from shoal.kv_transfer import actions as act
from shoal.kv_transfer import metrics, wire
from shoal.kv_transfer.backends import PREFILL_RANK, Backend
from shoal.kv_transfer.control import ControlStream, sender_beat
from shoal.kv_transfer.dial import Connect, DecodeTarget, Dialled
from shoal.kv_transfer.faults import Faults
from shoal.kv_transfer.handle import Handle
from shoal.kv_transfer.lane import Lane
from shoal.kv_transfer.lending import lent
from shoal.kv_transfer.outgoing import KvSource, OutgoingTransfer
from shoal.kv_transfer.perform import Performer
from shoal.kv_transfer.rendezvous import PairStore
from shoal.kv_transfer.sender import SenderMachine
from shoal.kv_transfer.staging import Gate, StagingBuffer, StagingPool
from shoal.pb.internal.v1 import transfer_pb2 as pb
from shoal.placement.plan import Entry, TransferPlan

logger = logging.getLogger(__name__)
_NUM_SPARE = 2  # staging buffers that steps leave to what is ready already
_PARTING_S = 0.5  # for the last words on a stream that is being closed


@dataclass(frozen=True, slots=True)
class SenderShared:
    """What the pairs of one prefill worker share."""

    config: TransferConfig
    backend: Backend
    staging: StagingPool
    sends: Gate
    faults: Faults
    connect: Connect
    memory: SharedMemory | None = None  # the worker's pool, where decode reads it


class OutgoingPair:
    """One control stream and one channel to one decode worker. Every method belongs to the event loop."""

    def __init__(self, target: DecodeTarget, shared: SenderShared) -> None:
        self.used_s = time.monotonic()
        self.error: ShoalError | None = None  # why it closed
        self._shared = shared
        self._machine = SenderMachine(
            window=shared.config.max_receives_in_flight + 1,
            lease_s=shared.config.lease_s,
            max_joined_bytes=shared.backend.max_joined_bytes,
        )
        self._perform = Performer(self._carry_out)
        self._transfers: dict[str, OutgoingTransfer] = {}
        self._granted: StagingBuffer | None = None
        self._buffers: dict[int, StagingBuffer] = {}  # by ticket
        self._issues: deque[act.Issue] = deque()  # Go came, no place to send yet
        self._placed: set[int] = set()  # tickets that hold a place of `sends`
        self._dialled = Dialled(target, shared.connect)
        self._loop = asyncio.get_running_loop()
        self._store = PairStore(self._tell, shared.config.connect_timeout_s)
        self._target = target
        self._stream: ControlStream[pb.SenderMessage] | None = None
        self._lane: Lane | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_up = False

    @property
    def is_idle(self) -> bool:
        """No attempt lives, no message awaits its answer or return."""
        return self._machine.is_idle

    async def start(self, hello: pb.Hello) -> None:
        """Meet the decode worker and make the group. Raises Unavailable or the error it refuses us with."""
        config = self._shared.config
        try:
            async with asyncio.timeout(config.connect_timeout_s):
                welcome = await self._dialled.greet(hello, self._shared.faults)
                self._stream = self._listen(welcome.heartbeat_s)
                self._lane = self._make_lane()
                await self._lane.connected
        except TimeoutError:
            self.close(Unavailable(f"decode worker {self._target.worker_id} made no pair within {config.connect_timeout_s:g} s"))
        except ShoalError as error:
            self.close(error)
        except asyncio.CancelledError:
            self.close(Unavailable("making the pair was given up"))
            raise
        if self.error is not None:
            raise self.error
        self._is_up = True
        metrics.PAIRS.labels("sent").inc()
        logger.info("pair to decode worker %s, epoch %d, is up", self._target.worker_id, self._target.epoch)

    def open(self, handle: Handle, plan: TransferPlan, source: KvSource) -> OutgoingTransfer:
        """Start a transfer on this pair. Raises Unavailable once it has closed."""
        self.used_s = time.monotonic()
        actions = self._machine.open(handle.attempt_id, handle.encode(), plan, self.used_s)
        lease = self._shared.memory.lease() if self._shared.memory is not None else None
        transfer = OutgoingTransfer(handle.attempt_id, source, plan, self._shared.config.gathered_bytes, self, lease)
        self._transfers[handle.attempt_id] = transfer
        self._perform(actions)
        return transfer

    def entries_ready(self, attempt_id: str, indices: Sequence[int]) -> None:
        """Entries of one of this pair's attempts have their bytes."""
        self._perform(self._machine.entries_ready(attempt_id, indices, time.monotonic()))

    def lend(self, transfer: OutgoingTransfer) -> None:
        """Let a running step pack into a staging buffer itself. Not where others need it, and not on a GPU."""
        packs = self._shared.memory is None and self._shared.backend.device.type == "cpu"
        is_wanted = packs and self.error is None and transfer.gathering.takes_buffer
        buffer = self._shared.staging.try_take(_NUM_SPARE) if is_wanted else None
        if buffer is None:
            return
        ticket = self._machine.lend(transfer.attempt_id)
        if ticket is None:
            self._shared.staging.release(buffer)
            return
        self._buffers[ticket] = buffer
        if not transfer.gathering.offer(ticket, buffer.memory):
            self._perform(self._machine.filled(ticket, (), None, time.monotonic()))

    def filled(
        self,
        transfer: OutgoingTransfer,
        ticket: int,
        entries: Sequence[Entry],
        crcs: Sequence[int] | None,
        error: ShoalError | None,
    ) -> None:
        """A lent buffer has come back; the step may have use for another."""
        self._perform(self._machine.filled(ticket, entries, crcs, time.monotonic(), error))
        self.lend(transfer)

    def cancel(self, attempt_id: str, error: ShoalError) -> None:
        """Give one of this pair's attempts up. Harmless when repeated."""
        self._perform(self._machine.cancel(attempt_id, error))

    def close(self, error: ShoalError) -> None:
        """End every transfer now and tear the pair down behind. Idempotent."""
        if self.error is not None:
            return
        self.error = error
        self._perform(self._machine.closed(error))
        self._shared.staging.withdraw(self)
        self._shared.sends.withdraw(self)
        while self._issues:
            self._perform(self._machine.failed(self._issues.popleft().ticket))
        self._store.close(error)
        if self._lane is not None:
            self._lane.close(error, self._release_places)
        if self._is_up:
            metrics.PAIRS.labels("sent").dec()
            metrics.PAIR_FAILURES.labels("sent", type(error).__name__).inc()
            logger.info("pair to decode worker %s closed: %s", self._target.worker_id, error)
        self._tasks.append(asyncio.create_task(self._part(error)))

    async def torn_down(self) -> None:
        """Returns when stream and group are gone and every issued send has returned."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._lane is not None:
            await self._lane.closed.wait()

    def _make_lane(self) -> Lane:
        backend, timeout_s = self._shared.backend, self._shared.config.connect_timeout_s
        name = f"kv-to-{self._target.worker_id}"
        return Lane(name, lambda: backend.connect(self._store, PREFILL_RANK, timeout_s), self._shared.faults)

    def _tell(self, key: str, value: bytes) -> None:
        """Called on a thread of the lane."""
        if self._stream is not None:
            message = pb.SenderMessage(rendezvous=pb.Rendezvous(key=key, value=value))
            self._loop.call_soon_threadsafe(self._stream.put, message)

    def _listen(self, heartbeat_s: float) -> ControlStream[pb.SenderMessage]:
        stream = ControlStream[pb.SenderMessage](
            end="sent",
            write=self._dialled.call.write,
            faults=self._shared.faults,
            heartbeat_s=heartbeat_s,
            peer_timeout_s=heartbeat_s * self._shared.config.heartbeat_misses,
            beat=sender_beat,
            on_tick=lambda now: self._perform(self._machine.sweep(now)),
            on_silent=self.close,
        )
        self._tasks.append(asyncio.create_task(self._read(stream)))
        return stream

    async def _read(self, stream: ControlStream[pb.SenderMessage]) -> None:
        try:
            while (message := await self._dialled.read()) is not None:
                if await stream.heard(message):
                    continue
                kind = message.WhichOneof("message")
                if kind == "reject" and not message.reject.attempt_id:
                    self.close(wire.rejected(message.reject))
                elif kind == "rendezvous":
                    self._store.heard(message.rendezvous.key, message.rendezvous.value)
                elif kind != "heartbeat" and self.error is None:
                    self._perform(self._machine.on_message(message, time.monotonic()))
            self.close(Unavailable(f"decode worker {self._target.worker_id} closed the control stream"))
        except ShoalError as error:
            self.close(error)
        finally:
            self.close(Unavailable("the control stream is no longer read"))

    async def _part(self, error: ShoalError) -> None:
        if self._stream is not None:
            farewell = pb.SenderMessage(end=pb.End(attempt_id="", reason=str(error)))
            await self._stream.finish(farewell, _PARTING_S)
        await self._dialled.hang_up()

    def _carry_out(self, action: act.Action) -> None:
        match action:
            case act.Write(message=pb.SenderMessage() as message) if self._stream is not None:
                self._stream.put(message)
            case act.WantBuffer():
                if self.error is None:
                    self._shared.staging.request(self, self._grant)
            case act.ReturnBuffer():
                self._shared.staging.release(self._take_granted())
            case act.Pack():
                self._buffers[action.ticket] = self._take_granted()
                if self._shared.memory is not None:
                    self._locate(action)
                else:
                    self._pack(action, self._buffers[action.ticket].view(action.num_bytes))
            case act.Issue() if self._shared.memory is not None:  # decode has read it
                metrics.PAYLOAD.labels("sent").inc(action.num_bytes)
                self._perform(self._machine.sent(action.ticket, action.num_bytes, time.monotonic()))
            case act.Issue():
                if self.error is None:
                    self._issues.append(action)
                    self._shared.sends.request(self, self._issue)
                else:
                    self._perform(self._machine.failed(action.ticket))
            case act.FreeBuffer():
                self._shared.staging.release(self._buffers.pop(action.key))
            case act.Quarantine():
                self._shared.staging.quarantine(self._buffers[action.key])
            case act.Finish():
                transfer = self._transfers.pop(action.attempt_id)
                if self._shared.memory is not None and transfer.lease is not None:
                    self._shared.memory.end(transfer.lease)  # before its blocks can be anybody else's
                transfer.finish(action)
                self.used_s = time.monotonic()
            case act.Accepted():
                accepted = self._transfers[action.attempt_id].accepted
                if not accepted.done():
                    accepted.set_result(None)
            case act.ClosePair():
                self.close(action.error)
            case _:
                raise InternalError(f"the prefill end cannot carry out {type(action).__name__}")

    def _grant(self, buffer: StagingBuffer) -> None:
        self._granted = buffer
        self._perform(self._machine.granted())

    def _take_granted(self) -> StagingBuffer:
        buffer, self._granted = self._granted, None
        if buffer is None:
            raise InternalError("a buffer was used that had not been granted")
        return buffer

    def _locate(self, action: act.Pack) -> None:
        """Say where entries lie, instead of packing them."""
        transfer = self._transfers.get(action.attempt_id)
        crcs: list[int] | None = [0] * len(action.entries)
        where: pb.Lent | None = None
        failure: ShoalError | None = None
        try:
            if transfer is not None and transfer.lease is not None and not transfer.is_lent:
                where, transfer.is_lent = lent(transfer.lease, transfer.source), True
        except ShoalError as error:
            crcs, failure = None, error
        self._perform(self._machine.packed(action.ticket, crcs, time.monotonic(), failure, where))

    def _pack(self, action: act.Pack, view: torch.Tensor) -> None:
        transfer = self._transfers.get(action.attempt_id)
        lane, faults = self._lane, self._shared.faults
        if transfer is None or lane is None or self.error is not None:
            self._perform(self._machine.packed(action.ticket, None, time.monotonic()))
            return

        def packed(crcs: list[int] | None, error: ShoalError | None) -> None:
            self._perform(self._machine.packed(action.ticket, crcs, time.monotonic(), error))

        def job() -> None:
            try:
                faults.hit("before-pack")
                crcs = transfer.guard.copy(transfer.source.pack, action.entries, view)
                faults.hit("after-pack")
            except ShoalError as error:
                lane.report(packed, None, error)
            else:
                lane.report(packed, crcs, None)

        lane.run(job)

    def _issue(self) -> None:
        """A place to send is free: issue the oldest message that has its Go."""
        issue = self._issues.popleft()
        ticket = issue.ticket
        self._placed.add(ticket)
        assert self._lane is not None
        timeout_s = self._shared.config.message_timeout_s(issue.num_bytes)
        view = self._buffers[ticket].view(issue.num_bytes)

        def sent(num_bytes: int) -> None:
            metrics.PAYLOAD.labels("sent").inc(num_bytes)
            self._leave_place(ticket)
            self._perform(self._machine.sent(ticket, num_bytes, time.monotonic()))

        def failed(error: ShoalError) -> None:
            self._leave_place(ticket)
            self._perform(self._machine.failed(ticket))
            self.close(error)

        self._lane.send(issue.n, view, timeout_s, sent, failed)
        if self._issues:
            self._shared.sends.request(self, self._issue)

    def _leave_place(self, ticket: int) -> None:
        if ticket in self._placed:
            self._placed.discard(ticket)
            self._shared.sends.release()

    def _release_places(self) -> None:
        """The channel has been aborted: what it had issued no longer occupies the device."""
        for ticket in list(self._placed):
            self._leave_place(ticket)
