"""The threads of one pair's end: one issues, one waits. Knows channels and buffers; knows no protocol and no streams.

The group is made by the issuing thread, so that making it blocks nobody else. Results come back as calls on the event loop.
Both threads end by themselves: every wait has a timeout sized from its bytes.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from shoal.errors import InternalError, ShoalError, Unavailable
from shoal.kv_transfer.channel import PairChannel, Pending
from shoal.kv_transfer.faults import Faults

_BROKEN_S = 0.01

Report = Callable[..., None]  # called on the event loop


class _Awaited(NamedTuple):
    pending: Pending
    timeout_s: float
    done: Callable[[int], None]  # on the waiting thread, with the bytes
    failed: Callable[[ShoalError], None]  # on the waiting thread


class Lane:
    """One end of one pair. Methods are called on the event loop and return at once; `closed` is set when all is torn down."""

    def __init__(self, name: str, connect: Callable[[], PairChannel], faults: Faults) -> None:
        self._loop = asyncio.get_running_loop()
        self._connect = connect
        self._faults = faults
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._awaited: queue.SimpleQueue[_Awaited | None] = queue.SimpleQueue()
        self._channel: PairChannel | None = None
        self._name = name
        self._closing = False
        self.closed = asyncio.Event()
        self.connected: asyncio.Future[None] = self._loop.create_future()
        self.connected.add_done_callback(lambda future: future.cancelled() or future.exception())  # nobody may be waiting
        self._waiter = threading.Thread(target=self._wait_all, name=f"{name}-wait", daemon=True)
        threading.Thread(target=self._issue_all, name=f"{name}-issue", daemon=True).start()

    def run(self, job: Callable[[], None]) -> None:
        """Run a job (packing) on the issuing thread, in order."""
        self._jobs.put(job)

    def send(self, n: int, buffer: torch.Tensor, timeout_s: float, sent: Callable[[int], None], failed: Report) -> None:
        """Send message n; `sent(bytes)` or `failed(error)` follows on the loop."""

        def job() -> None:
            if self._faults.hit("before-send"):
                buffer[0] ^= 0xFF
            pending = self._open_channel().send(n, buffer)
            self._faults.hit("mid-send")
            self._awaited.put(_Awaited(pending, timeout_s, done, lambda error: self.report(failed, error)))

        def done(num_bytes: int) -> None:
            self._faults.hit("after-send")
            self.report(sent, num_bytes)

        self._jobs.put(lambda: self._guarded(job, failed))

    def receive(
        self,
        n: int,
        buffer: torch.Tensor,
        timeout_s: float,
        *,
        posted: Report,
        arrived: Callable[[int], None],
        failed: Report,
    ) -> None:
        """Post the receive of message n. `posted()` follows on the loop, `arrived(bytes)` on the WAITING thread; or `failed`."""

        def job() -> None:
            self._faults.hit("before-post")
            pending = self._open_channel().post_recv(n, buffer)
            self._awaited.put(_Awaited(pending, timeout_s, done, lambda error: self.report(failed, error)))
            self._faults.hit("after-post")
            self.report(posted)

        def done(num_bytes: int) -> None:
            self._faults.hit("after-receive")
            arrived(num_bytes)

        self._jobs.put(lambda: self._guarded(job, failed))

    def close(self, error: ShoalError, aborted: Report) -> None:
        """Abort, report `aborted()`, wait for what was issued, tear the group down. Idempotent; nothing may be asked after it."""
        if self._closing:
            return
        self._closing = True
        self._settle_connected(error)

        def abort() -> None:
            try:
                if self._channel is not None:
                    self._channel.abort()
            finally:
                self.report(aborted)

        # not on the issuing thread: it may be blocked in the very call that the abort is to end
        threading.Thread(target=abort, name=f"{self._name}-abort", daemon=True).start()
        self._jobs.put(None)

    def report(self, call: Report, *args: object) -> None:
        """Call back on the event loop; a loop that has ended no longer cares."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _issue_all(self) -> None:
        try:
            self._channel = self._connect()
        except Exception as error:  # noqa: BLE001  # reported to whoever waits for the pair
            self.report(self._settle_connected, _named(error))
        else:
            self._waiter.start()
            self.report(self._settle_connected, None)
        while (job := self._jobs.get()) is not None:
            job()
        if self._channel is not None:
            self._awaited.put(None)
            self._waiter.join()
            self._channel.close()
        self.report(self.closed.set)

    def _wait_all(self) -> None:
        is_broken = False
        while (awaited := self._awaited.get()) is not None:
            try:
                # a wait that failed has closed the channel: nothing behind it can still move, yet each would wait its whole time
                num_bytes = awaited.pending.wait(_BROKEN_S if is_broken else awaited.timeout_s)
            except Exception as error:  # noqa: BLE001  # reported to the pair, which closes: this thread must outlive it
                is_broken = True
                awaited.failed(_named(error))
            else:
                awaited.done(num_bytes)

    def _settle_connected(self, error: ShoalError | None) -> None:
        if self.connected.done():
            return
        if error is None:
            self.connected.set_result(None)
        else:
            self.connected.set_exception(error)

    def _guarded(self, job: Callable[[], None], failed: Report) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001  # reported to the pair, which closes: this thread must outlive it
            self.report(failed, _named(error))

    def _open_channel(self) -> PairChannel:
        if self._channel is None:
            raise Unavailable("the pair was never made")
        return self._channel


def _named(error: Exception) -> ShoalError:
    return (
        error if isinstance(error, ShoalError) else InternalError(f"the pair's channel failed: {type(error).__name__}: {error}")
    )
