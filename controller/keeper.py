"""Keeps one slot filled: starts its worker, watches it, starts the next epoch when it dies. Knows no other slot.

starting ──ready──▶ serving ──lifeline ends, or not SERVING for long──▶ killed ──back-off──▶ starting (epoch + 1)
    └──fails──▶ killed ──back-off──▶ starting (epoch + 1), or given up with words
starting, serving ──retire──▶ draining ──▶ gone, and the slot with it
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from shoal import errors
from shoal.controller.backoff import RestartPolicy
from shoal.controller.endpoints import EndpointBoard, EndpointState
from shoal.controller.events import EventWriter
from shoal.controller.health import wait_until_ill
from shoal.controller.names import ActorName, Slot
from shoal.controller.ray_cluster import ActorHandle
from shoal.errors import DeadlineExceeded, InternalError, ShoalError, Unavailable
from shoal.metrics import counter, histogram
from shoal.pb.internal.v1 import worker_pb2
from shoal.rpc import ClusterLink

_log = logging.getLogger(__name__)

_RESTARTS = counter("shoal_controller_restarted_workers_total", "Workers started again after a death or a hang", ("pool",))
_RETIRED = counter("shoal_controller_retired_workers_total", "Workers drained and ended by order", ("pool",))
_DRAIN_SECONDS = histogram("shoal_controller_drain_seconds", "From a worker's last new request to its end", ("pool",))
_PLACEMENT_NOTICE_S = 15.0
_TELL_ROUTERS_S = 0.25  # so long routers may take to hear that a worker drains, before it refuses what they send


class WorkerGivenUp(ShoalError):
    """A slot cannot be filled; the text says why and what to change."""


class SlotKeeper:
    """Runs until cancelled. `spawn` makes the actor of an epoch."""

    def __init__(
        self,
        slot: Slot,
        *,
        first_epoch: int,
        spawn: Callable[[ActorName], ActorHandle],
        board: EndpointBoard,
        events: EventWriter,
        policy: RestartPolicy,
        start_timeout_s: float,
        hang_timeout_s: float,
        link: ClusterLink | None = None,
    ) -> None:
        self.slot = slot
        self.handle: ActorHandle | None = None
        self.ready = asyncio.Event()
        self.machine = ""  # of the worker that fills the slot, until it is gone; "": it has none yet
        self._name = ActorName(slot, first_epoch)
        self._spawn = spawn
        self._board = board
        self._events = events
        self._policy = policy
        self._start_timeout_s = start_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._link = link or ClusterLink()

    def adopt(self, handle: ActorHandle, description: worker_pb2.WorkerDescription) -> None:
        """Take over an actor that an earlier controller left running. Call before `run`."""
        self.handle, self._name = handle, handle.name
        self._set_ready(description, "adopted")

    async def run(self) -> None:
        """Keep the slot filled. Raises WorkerGivenUp when starting is hopeless."""
        num_failures = 0
        while True:
            if self.handle is None:
                try:
                    await self._start()
                except ShoalError as error:
                    num_failures += 1
                    delay_s = None if self._policy.is_hopeless(error) else self._policy.delay_s(num_failures)
                    self._bury(f"could not start: {error}")
                    if delay_s is None:
                        tries = f" ({num_failures} tries)" if num_failures > 1 else ""
                        raise WorkerGivenUp(f"{self.slot.worker_id} cannot start{tries}: {error}") from error
                    await asyncio.sleep(delay_s)
                    continue
            ready_at = asyncio.get_running_loop().time()
            self._bury(await self._watch())
            if asyncio.get_running_loop().time() - ready_at > self._policy.max_delay_s:
                num_failures = 0
            _RESTARTS.labels(self.slot.pool).inc()

    @property
    def next_epoch(self) -> int:
        """The first that was never used here."""
        return self._name.epoch + 1

    async def retire(self, drain_s: float) -> None:
        """Give the slot up: no new requests, what runs may finish for so long, the rest is handed over, the process ends.

        Call after `run` has been cancelled. Requests that run when `drain_s` is over go on elsewhere: their routers see to it.
        """
        began_at, was_ready = asyncio.get_running_loop().time(), self.ready.is_set()
        if was_ready:
            self._board.set(self._name, EndpointState.DRAINING)
            self._events.emit("draining", self.slot.worker_id, epoch=self._name.epoch)
            await asyncio.sleep(_TELL_ROUTERS_S)
        await self._end(drain_s)
        self._board.remove(self._name)  # not DEAD: its streams have ended, and their last words may still be on the way
        seconds = asyncio.get_running_loop().time() - began_at
        _RETIRED.labels(self.slot.pool).inc()
        if was_ready:
            _DRAIN_SECONDS.labels(self.slot.pool).observe(seconds)
        _log.info("%s is gone, %.1f s after it began to drain", self.slot.worker_id, seconds)
        self._events.emit("gone", self.slot.worker_id, epoch=self._name.epoch, seconds=seconds)

    async def stop(self, grace_s: float) -> None:
        """Drain the worker and end its process. Call after `run` has been cancelled."""
        if self.handle is not None:
            await self._end(grace_s)
            self._board.set(self._name, EndpointState.DEAD)

    async def _end(self, grace_s: float) -> None:
        if (handle := self.handle) is None:
            return
        self.handle = None
        if not self.ready.is_set():  # nobody has been told of it: there is nothing to finish
            handle.kill()
            return
        try:
            async with asyncio.timeout(grace_s + 5):
                await handle.stop(grace_s)
        except (TimeoutError, Unavailable) as error:
            _log.warning("%s did not stop in time and is killed: %s", self.slot.worker_id, str(error) or "no answer")
        finally:
            handle.kill()

    async def _start(self) -> None:
        self._board.set(self._name, EndpointState.STARTING)
        self._events.emit("starting", self.slot.worker_id, epoch=self._name.epoch)
        self.handle = handle = self._spawn(self._name)
        notice = asyncio.get_running_loop().call_later(_PLACEMENT_NOTICE_S, self._say_unplaced)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                async for told in handle.start():
                    notice.cancel()
                    if "loading" in told:
                        done, total = told["loading"]
                        self._events.emit("loading", self.slot.worker_id, done=done, total=total)
                    elif "failed" in told:
                        raise _error_of(told)
                    else:
                        self._set_ready(worker_pb2.WorkerDescription.FromString(bytes.fromhex(told["ready"])), "ready")
                        return
        except TimeoutError:
            raise DeadlineExceeded(f"not ready within {self._start_timeout_s:g} s (start_timeout_s)") from None
        finally:
            notice.cancel()
        raise InternalError("the worker's start ended without a word")

    def _set_ready(self, description: worker_pb2.WorkerDescription, how: str) -> None:
        self._address = description.address
        self.machine = self.handle.machine if self.handle is not None else ""
        self._board.set(self._name, EndpointState.READY, description)
        self.ready.set()
        _log.info("%s %s, epoch %d, at %s", self.slot.worker_id, how, self._name.epoch, description.address)
        self._events.emit("ready", self.slot.worker_id, epoch=self._name.epoch, address=description.address)

    @property
    def worker(self) -> tuple[str, int]:
        """Id and epoch of who fills the slot now."""
        return self.slot.worker_id, self._name.epoch

    async def _watch(self) -> str:
        assert self.handle is not None
        watches = (
            asyncio.create_task(self.handle.wait_for_death()),
            asyncio.create_task(wait_until_ill(self._address, self._hang_timeout_s, self._link)),
        )
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()

    def _bury(self, cause: str) -> None:
        """Publish the death, make certain of it, and move on to the next epoch."""
        self.ready.clear()
        self.machine = ""
        self._board.set(self._name, EndpointState.DEAD)
        _log.warning("%s epoch %d is dead: %s", self.slot.worker_id, self._name.epoch, cause)
        self._events.emit("dead", self.slot.worker_id, cause, epoch=self._name.epoch)
        if self.handle is not None:
            self.handle.kill()
            self.handle = None
        self._name = self._name.next()

    def _say_unplaced(self) -> None:
        after = f"after {_PLACEMENT_NOTICE_S:.0f} s"
        message = f"Ray has not started it {after}: a busy machine, too few free CPUs or GPUs, or no node with its pool label"
        _log.warning("%s: %s", self.slot.worker_id, message)
        self._events.emit("starting", self.slot.worker_id, message, epoch=self._name.epoch)


def _error_of(told: dict[str, Any]) -> ShoalError:
    kind = getattr(errors, str(told["failed"]), InternalError)
    return kind(told["message"]) if isinstance(kind, type) and issubclass(kind, ShoalError) else InternalError(told["message"])
