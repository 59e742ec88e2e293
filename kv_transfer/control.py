"""One end of a control stream: writes in order, beats, and notices silence. Knows message kinds for faults and counting only."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

import grpc

from shoal.errors import ShoalError, Unavailable
from shoal.kv_transfer import metrics
from shoal.kv_transfer.faults import Faults
from shoal.pb.internal.v1 import transfer_pb2 as pb

logger = logging.getLogger(__name__)

_MAX_UNWRITTEN: Final = 4096  # messages; a peer that reads has far fewer waiting

M = TypeVar("M", pb.SenderMessage, pb.ReceiverMessage)


class ControlStream(Generic[M]):
    """The writing half and the clock of a control stream. `on_silent(error)` is called once, when the peer is dead or hung."""

    def __init__(
        self,
        *,
        end: str,
        write: Callable[[M], Awaitable[object]],
        faults: Faults,
        heartbeat_s: float,
        peer_timeout_s: float,
        beat: Callable[[int], M],
        on_tick: Callable[[float], None],
        on_silent: Callable[[ShoalError], None],
    ) -> None:
        self._write: Callable[[M], Awaitable[object]] = write
        self._faults = faults
        self._heartbeat_s = heartbeat_s
        self._peer_timeout_s = peer_timeout_s
        self._beat: Callable[[int], M] = beat
        self._on_tick = on_tick
        self._on_silent = on_silent
        self._outbox: asyncio.Queue[M] = asyncio.Queue()
        self._heard_s = time.monotonic()
        self._counted = metrics.HEADERS.labels(end)
        self._tasks = [asyncio.create_task(self._write_all()), asyncio.create_task(self._tick_all())]

    def put(self, message: M) -> None:
        """Queue a message; they leave in order. A peer that writes but does not read is given up, as a silent one is."""
        self._outbox.put_nowait(message)
        if self._outbox.qsize() == _MAX_UNWRITTEN:
            self._on_silent(Unavailable(f"the peer has not read {_MAX_UNWRITTEN} control messages; its pair is closed"))

    async def heard(self, message: pb.SenderMessage | pb.ReceiverMessage) -> bool:
        """A message came. True means: a fault drops it."""
        self._heard_s = time.monotonic()
        self._counted.inc(message.ByteSize())
        return await self._faults.reach(f"on-{message.WhichOneof('message')}")

    async def finish(self, last: M | None, timeout_s: float) -> None:
        """Write what is queued and `last`, for at most `timeout_s`, and stop. Beats end at once."""
        writer, ticker = self._tasks
        ticker.cancel()
        if last is not None:
            self.put(last)
        drained = asyncio.ensure_future(self._outbox.join())
        try:
            await asyncio.wait([drained, writer], timeout=timeout_s, return_when="FIRST_COMPLETED")
        finally:
            drained.cancel()
            self.stop()

    def stop(self) -> None:
        """Stop at once. Idempotent."""
        for task in self._tasks:
            task.cancel()

    async def _write_all(self) -> None:
        try:
            while True:
                message = await self._outbox.get()
                kind = message.WhichOneof("message")
                if not await self._faults.reach(f"before-{kind}"):
                    await self._write(message)
                    self._counted.inc(message.ByteSize())
                    await self._faults.reach(f"after-{kind}")
                self._outbox.task_done()
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError, Unavailable) as error:
            # the reading half sees the stream's end too, and says more; this only keeps a half-closed stream from living on
            self._on_silent(Unavailable(f"the control stream can no longer be written: {type(error).__name__}"))

    async def _tick_all(self) -> None:
        sequence = 0
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(self._heartbeat_s)
            now = time.monotonic()
            # a loop that was itself held up has not listened: the peer is not charged for that time
            late = now - slept_at - self._heartbeat_s
            if late > self._heartbeat_s / 2:
                self._heard_s += late
            silent = now - self._heard_s
            if silent > self._peer_timeout_s:
                self._on_silent(Unavailable(f"the peer has been silent for {silent:.1f} s; its pair is closed"))
                return
            sequence += 1
            self.put(self._beat(sequence))
            self._on_tick(now)


def sender_beat(sequence: int) -> pb.SenderMessage:
    """Prefill's sign of life."""
    return pb.SenderMessage(heartbeat=pb.Heartbeat(sequence=sequence))


def receiver_beat(sequence: int) -> pb.ReceiverMessage:
    """Decode's sign of life."""
    return pb.ReceiverMessage(heartbeat=pb.Heartbeat(sequence=sequence))
