"""The controller's gRPC service: translate, nothing else."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING, Any

import grpc

from shoal.config.worker import Pool
from shoal.controller.events import Event
from shoal.controller.pools import PoolChange
from shoal.errors import InvalidRequest, Unsupported
from shoal.pb.internal.v1 import controller_pb2, controller_pb2_grpc

if TYPE_CHECKING:
    from shoal.controller.controller import Controller

    Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)
_TOLD = ("starting", "loading", "ready", "warm", "draining", "gone", "dead", "failed")  # kinds of events
_MAX_SURGE = 1024


class ControllerServicer(controller_pb2_grpc.ControllerServicer):
    """Publishes the board to any number of routers, and takes orders."""

    def __init__(self, controller: "Controller") -> None:
        self._controller = controller

    async def WatchEndpoints(
        self, request: controller_pb2.WatchEndpointsRequest, context: "Context"
    ) -> AsyncIterator[controller_pb2.Endpoints]:
        _log.info("router %s watches endpoints", request.router_id or context.peer())
        async for endpoints in self._controller.board.watch():
            yield endpoints

    async def Scale(self, request: controller_pb2.ScaleRequest, context: "Context") -> AsyncIterator[controller_pb2.PoolEvent]:
        controller, sizes = self._controller, _sizes(request)
        drain_s = _drain_s(request)
        if request.dry_run:
            controller.check_sizes(sizes, allow_pending=request.allow_pending)
            for pool, size in sizes.items():
                for words, workers in zip(("would start", "would drain"), controller.pools.preview(pool, size), strict=True):
                    for worker_id in workers:
                        yield controller_pb2.PoolEvent(kind="plan", worker_id=worker_id, message=words)
            yield controller_pb2.PoolEvent(kind="done", message="nothing was changed")
            return
        with controller.events.listening() as events:
            change = controller.set_pool_sizes(sizes, drain_s=drain_s, allow_pending=request.allow_pending)
            _log.info("scaling to %s", ", ".join(f"{size} {pool}" for pool, size in sizes.items()))
            work = asyncio.ensure_future(controller.settled(change))
            async for event in _told(events, work, _ids(change)):
                yield event

    async def RollingRestart(
        self, request: controller_pb2.RollingRestartRequest, context: "Context"
    ) -> AsyncIterator[controller_pb2.PoolEvent]:
        controller = self._controller
        pools = _pools(request) or [pool for pool in Pool if controller.pools.keepers(pool)]
        surge = request.surge if request.HasField("surge") else 1
        if surge > _MAX_SURGE:
            raise InvalidRequest(f"surge must be at most {_MAX_SURGE}, not {surge}")
        drain_s = _drain_s(request)
        if request.dry_run:
            controller.check_restart(pools, surge)
            for pool in pools:
                for keeper in controller.pools.keepers(pool):
                    yield controller_pb2.PoolEvent(kind="plan", worker_id=keeper.slot.worker_id, message="would be replaced")
            yield controller_pb2.PoolEvent(kind="done", message="nothing was changed")
            return
        with controller.events.listening() as events:
            work = controller.begin_rolling_restart(pools, surge=surge, drain_s=drain_s)
            _log.info("rolling restart of %s, surge %d", ", ".join(pools), surge)
            async for event in _told(events, asyncio.shield(work), None):
                yield event

    async def WatchScaling(
        self, request: controller_pb2.WatchScalingRequest, context: "Context"
    ) -> AsyncIterator[controller_pb2.ScalingDecision]:
        if self._controller.autoscaler is None:
            raise Unsupported(
                "this cluster does not scale its pools; start it with --autoscale-prefill or --autoscale-decode, as in 1-4"
            )
        async for decision in self._controller.autoscaler.decisions.watch(follow=request.follow):
            yield decision.to_pb()


async def _told(
    events: "asyncio.Queue[Event]", work: "asyncio.Future[None]", workers: Collection[str] | None
) -> AsyncIterator[controller_pb2.PoolEvent]:
    """Events of these workers (None: of all) until the work is done; then its end. Raises what it raised."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    try:
        while not (work.done() and events.empty()):
            following = asyncio.ensure_future(events.get())
            await asyncio.wait((following, work), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                following.cancel()
                continue
            event = following.result()
            if event.kind in _TOLD and event.worker and (workers is None or event.worker in workers):
                yield _message(event)
        work.result()
    finally:
        work.cancel()  # it only waits: what has been ordered goes on
    yield controller_pb2.PoolEvent(kind="done", seconds=loop.time() - began_at)


def _message(event: Event) -> controller_pb2.PoolEvent:
    message = controller_pb2.PoolEvent(kind=event.kind, worker_id=event.worker, message=event.message)
    message.seconds = float(event.data.get("seconds", 0.0))
    message.loaded_bytes, message.total_bytes = int(event.data.get("done", 0)), int(event.data.get("total", 0))
    return message


def _ids(change: PoolChange) -> frozenset[str]:
    return frozenset(keeper.slot.worker_id for keeper in (*change.started, *change.retired))


def _sizes(request: controller_pb2.ScaleRequest) -> dict[Pool, int]:
    named = ((Pool.PREFILL, "prefill_workers"), (Pool.DECODE, "decode_workers"))
    return {pool: getattr(request, field) for pool, field in named if request.HasField(field)}


def _pools(request: controller_pb2.RollingRestartRequest) -> list[Pool]:
    try:
        return list(dict.fromkeys(Pool(name) for name in request.pools))
    except ValueError:
        raise InvalidRequest(f"there is no pool named {list(request.pools)}; pools are {', '.join(Pool)}") from None


def _drain_s(request: "controller_pb2.ScaleRequest | controller_pb2.RollingRestartRequest") -> float | None:
    if not request.HasField("drain_s"):
        return None
    if not (math.isfinite(request.drain_s) and request.drain_s >= 0):
        raise InvalidRequest(f"drain_s must be a number of seconds, 0 or more, not {request.drain_s}")
    return request.drain_s
