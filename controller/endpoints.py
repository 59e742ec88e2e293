"""What routers are told: every worker slot's present endpoint. Knows states and versions; knows no Ray and no transport."""

import asyncio
from collections.abc import AsyncIterator
from enum import StrEnum

from shoal.controller.names import ActorName
from shoal.metrics import gauge
from shoal.pb.internal.v1 import controller_pb2, worker_pb2

_WORKERS = gauge("shoal_controller_workers", "Workers by pool and state", ("pool", "state"))


class EndpointState(StrEnum):
    """The life of a worker as routers see it. Only `ready` takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class EndpointBoard:
    """The list of endpoints, one per slot. Each change gets a version; watchers see the newest whole list, never a backlog."""

    def __init__(self) -> None:
        self._endpoints: dict[str, controller_pb2.Endpoint] = {}
        self._version = 0
        self._changed = asyncio.Event()
        self._closed = False

    def set(
        self, actor: ActorName, state: EndpointState, description: worker_pb2.WorkerDescription | None = None
    ) -> controller_pb2.Endpoint:
        """Put the slot's endpoint; without a description the one of the same epoch is kept."""
        worker = worker_pb2.WorkerDescription(worker_id=actor.slot.worker_id, pool=actor.slot.pool, epoch=actor.epoch)
        before = self._endpoints.get(actor.slot.worker_id)
        if description is not None:
            worker = description
        elif before is not None and before.worker.epoch == actor.epoch:
            worker = before.worker
        endpoint = controller_pb2.Endpoint(worker=worker, state=state)
        self._endpoints[actor.slot.worker_id] = endpoint
        self._published()
        return endpoint

    def remove(self, actor: ActorName) -> None:
        """The slot is no more. Unlike a death this ends nothing that still runs there."""
        if self._endpoints.pop(actor.slot.worker_id, None) is not None:
            self._published()

    @property
    def snapshot(self) -> controller_pb2.Endpoints:
        return controller_pb2.Endpoints(version=self._version, endpoints=list(self._endpoints.values()))

    def ready(self, pool: str) -> list[worker_pb2.WorkerDescription]:
        """Descriptions of the pool's workers that take requests."""
        return [e.worker for e in self._endpoints.values() if e.state == EndpointState.READY and e.worker.pool == pool]

    async def watch(self) -> AsyncIterator[controller_pb2.Endpoints]:
        """The whole list at once, and again after changes (changes made while the watcher was busy come as one)."""
        while not self._closed:
            changed, snapshot = self._changed, self.snapshot
            yield snapshot
            await changed.wait()

    def close(self) -> None:
        """End every watch."""
        self._closed = True
        self._wake()

    def _published(self) -> None:
        self._version += 1
        for pool in ("prefill", "decode"):
            states = [e.state for e in self._endpoints.values() if e.worker.pool == pool]
            for each in EndpointState:
                _WORKERS.labels(pool, each).set(states.count(each))
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
