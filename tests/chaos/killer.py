"""Strikes: hits a process, sees who notices and when, and waits until it is back. One at a time; knows no request."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

import grpc
import psutil

from shoal.pb.v1 import shoal_pb2
from tests.chaos.cluster import CONTROLLER, ROUTER, Ident, Victims
from tests.chaos.plan import Deed, Moment, Strike

BACK_WITHIN_S = 180.0  # a worker starts Python, torch and its model anew, on a busy machine
_STOPS = (Deed.HANG, Deed.PAUSE, Deed.HANG_ROUTER)
_LOOK_S = 0.02
_PAUSE_S = 0.5, 6.0  # peers give a silent one up after 3 s, the controller after 10 (the default of --hang-timeout-s)
_MOMENT_WITHIN_S = 3.0  # else the worker is hit as it stands


@dataclass(slots=True)
class Hit:
    """One strike and what followed, in seconds since it; None: not seen."""

    deed: Deed
    name: str
    moment: Moment
    at_s: float  # of the run's clock
    dropped_s: float | None = None  # the router lists it as ready no more
    noticed_s: float | None = None  # the controller's log says that it is dead
    back_s: float | None = None  # SERVING again
    fault: str = ""  # what was not as it must be


class Killer:
    """`run` strikes until told to stop. `hits` fills up."""

    def __init__(self, victims: Victims, strikes: Iterator[Strike]) -> None:
        self._victims = victims
        self._strikes = strikes
        self._idents: dict[str, Ident] = {}
        self._epochs: dict[str, int] = {}
        self.hits: list[Hit] = []

    async def run(self, stop: asyncio.Event, struck: Callable[[Hit], None], limit: int | None = None) -> None:
        """Strike as soon as the last victim is back, until `stop` or `limit`; ends between two strikes."""
        await self._look()
        while not stop.is_set() and (limit is None or len(self.hits) < limit):
            hit = await self._strike(next(self._strikes))
            self.hits.append(hit)
            struck(hit)
            if hit.back_s is None:
                return  # the cluster is not whole: more strikes would only hide why

    async def innocents(self) -> list[str]:
        """Who has another process than it had when last seen, without having been struck."""
        before, epochs = self._idents, self._epochs
        await self._look()
        changed = {name for name, ident in before.items() if self._idents.get(name) != ident}
        changed |= {name for name, epoch in epochs.items() if self._epochs.get(name) != epoch}
        return sorted(changed)

    async def _look(self) -> None:
        self._idents = await self._victims.idents()
        self._epochs = {name: worker.epoch for name, worker in (await self._victims.workers()).items()}

    async def _strike(self, strike: Strike) -> Hit:
        names = await self._names(strike)
        processes = [self._idents[name].find() for name in names]
        log_size, wall_s = self._victims.log_size, time.time()
        hit = Hit(strike.deed, "+".join(names), strike.moment, time.monotonic())
        for process in processes:
            if process is None:
                hit.fault = "it was gone before it was struck"
                return hit
            process.send_signal(signal.SIGSTOP if strike.deed in _STOPS else signal.SIGKILL)
        if strike.deed is Deed.PAUSE and processes[0] is not None:
            await asyncio.sleep(_PAUSE_S[0] + (_PAUSE_S[1] - _PAUSE_S[0]) * strike.pick)
            processes[0].send_signal(signal.SIGCONT)
            hit.back_s = await self._until(hit, lambda: self._answers(names[0]))
        else:
            await self._return(hit, names, log_size, wall_s)
            for name in names:
                self._idents.pop(name)
                self._epochs.pop(name, None)
        if hit.back_s is None:
            hit.fault = f"not SERVING within {BACK_WITHIN_S:g} s"
        elif others := await self.innocents():
            hit.fault = f"restarted with it: {', '.join(others)}"
        return hit

    async def _names(self, strike: Strike) -> list[str]:
        match strike.deed:
            case Deed.ROUTER | Deed.HANG_ROUTER:
                return [ROUTER]
            case Deed.CONTROLLER:
                return [CONTROLLER]
            case Deed.ORPHAN:
                return [CONTROLLER, await self._choose(strike, strike.pool)]
            case Deed.PAIR:
                return [await self._choose(strike, pool) for pool in ("prefill", "decode")]
            case _:
                return [await self._choose(strike, strike.pool)]

    async def _return(self, hit: Hit, names: list[str], log_size: int, wall_s: float) -> None:
        """Wait until all who were struck are back."""
        workers = {name: self._epochs[name] for name in names if name in self._epochs}
        backs: list[float | None] = []
        for name, epoch in workers.items():
            dropped_s = await self._until(hit, partial(self._dropped, name, epoch))
            hit.dropped_s = max(hit.dropped_s or 0.0, dropped_s or BACK_WITHIN_S)
        for name, epoch in workers.items():
            backs.append(await self._until(hit, partial(self._returned, name, epoch)))
            if (noticed := self._victims.dead_at(name, epoch, log_size)) is not None:
                hit.noticed_s = max(hit.noticed_s or 0.0, noticed - wall_s)
        if CONTROLLER in names:
            num_left = len(self._epochs) - len(workers)
            backs.append(await self._until(hit, partial(self._adopted, log_size, num_left)))
        if ROUTER in names:
            backs.append(await self._until(hit, self._router_serves))
        hit.back_s = None if None in backs else max(back for back in backs if back is not None)

    async def _choose(self, strike: Strike, pool: str) -> str:
        """A worker of the pool that does what the strike waits for, if one does so soon; else any."""
        deadline = time.monotonic() + _MOMENT_WITHIN_S
        while True:
            loads = sorted(await self._loads(pool), key=lambda load: load.worker_id)
            fitting = [load.worker_id for load in loads if _fits(load, strike.moment)]
            if fitting or time.monotonic() > deadline:
                names = fitting or sorted(name for name in self._epochs if name.startswith(pool))
                return names[int(strike.pick * len(names))]
            await asyncio.sleep(_LOOK_S)

    async def _loads(self, pool: str) -> list[shoal_pb2.WorkerLoad]:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return [load for load in (await self._victims.loads()).values() if load.pool == pool]
        return []

    async def _adopted(self, log_size: int, num_workers: int) -> bool:
        return self._victims.num_adopted_since(log_size) >= num_workers

    async def _answers(self, name: str) -> bool:
        return name in await self._victims.loads()

    async def _router_serves(self) -> bool:
        workers = await self._victims.workers(timeout_s=0.5)
        return len(workers) >= len(self._epochs) and all(worker.state == "ready" for worker in workers.values())

    async def _dropped(self, name: str, epoch: int) -> bool:
        worker = (await self._victims.workers()).get(name)
        return worker is None or worker.epoch != epoch or worker.state != "ready"

    async def _returned(self, name: str, epoch: int) -> bool:
        worker = (await self._victims.workers()).get(name)
        return worker is not None and worker.epoch > epoch and worker.state == "ready"

    async def _until(self, hit: Hit, holds: Callable[[], Awaitable[bool]]) -> float | None:
        """Seconds from the strike until it holds; None when it does not in time."""
        while (since := time.monotonic() - hit.at_s) < BACK_WITHIN_S:
            with contextlib.suppress(grpc.aio.AioRpcError, psutil.Error):
                if await holds():
                    return time.monotonic() - hit.at_s
            await asyncio.sleep(_LOOK_S if since < 2 else 5 * _LOOK_S)
        return None


def _fits(load: shoal_pb2.WorkerLoad, moment: Moment) -> bool:
    match moment:
        case Moment.TRANSFER:
            return load.num_transfers_in_flight > 0
        case Moment.RUNNING:
            return load.num_running_reqs > 0
        case _:
            return True
