"""The slots of both pools and how they change while requests run. Knows keepers and sizes; knows no Ray and no transport.

The desired size of a pool counts workers that are to stay. Beside them there may be workers that drain, and during a rolling
restart as many more as its surge allows.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.config.worker import Pool
from shoal.controller.keeper import SlotKeeper, WorkerGivenUp
from shoal.controller.machines import Held
from shoal.controller.names import Slot
from shoal.metrics import gauge

_log = logging.getLogger(__name__)
_DESIRED = gauge("shoal_controller_desired_workers", "Workers that a pool is to have", ("pool",))


@dataclass(frozen=True, slots=True)
class PoolChange:
    """What an order has set going: slots that are being filled, and slots that are being given up."""

    started: tuple[SlotKeeper, ...] = ()
    retired: tuple[SlotKeeper, ...] = ()


class Pools:
    """Owner of every keeper. `make_keeper` makes that of a slot, whose first worker gets the given epoch."""

    def __init__(self, make_keeper: Callable[[Slot, int], SlotKeeper], first_epoch: int) -> None:
        self._make_keeper = make_keeper
        self._first_epoch = first_epoch  # later than any of an earlier controller
        self._next_epoch: dict[Slot, int] = {}  # of slots that were given up
        self._running: dict[SlotKeeper, asyncio.Task[None]] = {}
        self._retiring: dict[SlotKeeper, asyncio.Task[None]] = {}
        self._given_up: asyncio.Queue[tuple[SlotKeeper, WorkerGivenUp]] = asyncio.Queue()
        self._failures: dict[SlotKeeper, asyncio.Future[None]] = {}  # fails when the keeper gives up
        self.desired: dict[Pool, int] = dict.fromkeys(Pool, 0)

    def keepers(self, pool: Pool | None = None) -> list[SlotKeeper]:
        """Those that fill their slots, by index."""
        found = [keeper for keeper in self._running if pool is None or keeper.slot.pool is pool]
        return sorted(found, key=lambda keeper: (keeper.slot.pool, keeper.slot.index))

    def held(self, pool: Pool) -> Held:
        """Where the pool's workers are, those that drain included."""
        machines = [keeper.machine for keeper in (*self._running, *self._retiring) if keeper.slot.pool is pool]
        return Held(frozenset(filter(None, machines)), sum(not keeper.machine for keeper in self.keepers(pool)))

    def keeper_of(self, worker_id: str) -> SlotKeeper | None:
        return next((keeper for keeper in (*self._running, *self._retiring) if keeper.slot.worker_id == worker_id), None)

    def set_size(self, pool: Pool, size: int, drain_s: float) -> PoolChange:
        """Bring a pool to a size: fill the lowest free slots, or give up those not ready yet, then the highest ones."""
        self.desired[pool] = size
        _DESIRED.labels(pool).set(size)
        keepers = self.keepers(pool)
        started = tuple(self.add(pool) for _ in range(size - len(keepers)))
        surplus = sorted(keepers, key=lambda keeper: (not keeper.ready.is_set(), keeper.slot.index))[size:]
        for keeper in surplus:
            self.retire(keeper, drain_s)
        return PoolChange(started, tuple(surplus))

    def preview(self, pool: Pool, size: int) -> tuple[list[str], list[str]]:
        """Ids that `set_size` would start and drain now."""
        keepers = self.keepers(pool)
        surplus = sorted(keepers, key=lambda keeper: (not keeper.ready.is_set(), keeper.slot.index))[size:]
        taken, starts = {keeper.slot for keeper in (*self._running, *self._retiring)}, list[str]()
        for _ in range(size - len(keepers)):
            slot = _lowest_free(pool, taken)
            taken.add(slot)
            starts.append(slot.worker_id)
        return starts, [keeper.slot.worker_id for keeper in surplus]

    def add(self, pool: Pool) -> SlotKeeper:
        """Fill the lowest free slot of a pool."""
        slot = _lowest_free(pool, {keeper.slot for keeper in (*self._running, *self._retiring)})
        keeper = self._make_keeper(slot, max(self._first_epoch, self._next_epoch.get(slot, 0)))
        self.keep(keeper)
        return keeper

    def keep(self, keeper: SlotKeeper) -> None:
        """Run a keeper until it is given up or retired."""
        task = self._running[keeper] = asyncio.create_task(keeper.run(), name=f"keep {keeper.slot.worker_id}")
        self._failures[keeper] = asyncio.get_running_loop().create_future()
        task.add_done_callback(lambda done: self._ended(keeper, done))

    def retire(self, keeper: SlotKeeper, drain_s: float) -> None:
        """Drain a worker and give its slot up."""
        self._running.pop(keeper).cancel()
        task = self._retiring[keeper] = asyncio.create_task(keeper.retire(drain_s), name=f"retire {keeper.slot.worker_id}")
        task.add_done_callback(lambda done: self._retired(keeper, done))

    async def filled(self, keepers: Iterable[SlotKeeper]) -> None:
        """Return once each is ready, or is no longer wanted. Raises WorkerGivenUp when one cannot start."""
        for keeper in keepers:
            ready = asyncio.create_task(keeper.ready.wait())
            try:
                if keeper in self._running:
                    watched = (ready, self._running[keeper], self._failures[keeper])
                    await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                if keeper in self._failures and self._failures[keeper].done():
                    self._failures[keeper].result()
            finally:
                ready.cancel()

    async def emptied(self, keepers: Iterable[SlotKeeper]) -> None:
        """Return once each of these retired workers is gone."""
        if tasks := [self._retiring[keeper] for keeper in keepers if keeper in self._retiring]:
            await asyncio.wait(tasks)

    async def next_given_up(self) -> tuple[SlotKeeper, WorkerGivenUp]:
        """Wait for a keeper that cannot fill its slot; it keeps nothing any more."""
        return await self._given_up.get()

    async def close(self, grace_s: float) -> None:
        """End every keeper's task, and let retirements that are under way come to their end, for so long."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self._retiring:
            _, late = await asyncio.wait(self._retiring.values(), timeout=grace_s + 5)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _ended(self, keeper: SlotKeeper, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            self._failures.pop(keeper).cancel()
            return
        self._running.pop(keeper, None)
        error = task.exception() or RuntimeError(f"the keeper of {keeper.slot.worker_id} ended")
        failure = self._failures[keeper]
        failure.set_exception(error)
        failure.exception()  # whoever waits is told; nobody need
        self._next_epoch[keeper.slot] = keeper.next_epoch
        if not isinstance(error, WorkerGivenUp):
            _log.critical("the keeper of %s ended by a bug", keeper.slot.worker_id, exc_info=error)
            error = WorkerGivenUp(f"the keeper of {keeper.slot.worker_id} ended: {error}")
        self._given_up.put_nowait((keeper, error))

    def _retired(self, keeper: SlotKeeper, task: "asyncio.Task[None]") -> None:
        self._retiring.pop(keeper, None)
        self._next_epoch[keeper.slot] = keeper.next_epoch
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s could not be retired in order", keeper.slot.worker_id, exc_info=error)


def _lowest_free(pool: Pool, taken: set[Slot]) -> Slot:
    return next(slot for index in range(len(taken) + 1) if (slot := Slot(pool, index)) not in taken)
