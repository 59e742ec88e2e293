"""The only Ray driver: fills both pools, adopts what it finds running, publishes endpoints, stops all in order."""

import asyncio
import json
import logging
import time
from typing import Any

from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool
from shoal.controller.backoff import RestartPolicy
from shoal.controller.endpoints import EndpointBoard, EndpointState
from shoal.controller.events import EventWriter
from shoal.controller.keeper import SlotKeeper, WorkerGivenUp
from shoal.controller.names import ActorName, Slot
from shoal.controller.prewarm import keep_pairs_warm
from shoal.controller.ray_cluster import ActorHandle, ActorResources, RayCluster, actor_environment
from shoal.controller.servicer import ControllerServicer
from shoal.errors import Unavailable
from shoal.pb.internal.v1 import controller_pb2, controller_pb2_grpc, worker_pb2
from shoal.rpc import Address, ClusterLink

_log = logging.getLogger(__name__)

_ADOPTION_TIMEOUT_S = 10.0


class Controller:
    """`start`, then `run` until the given stop, then `stop`."""

    def __init__(
        self, config: ServeConfig, cluster: RayCluster, events: EventWriter, policy: RestartPolicy | None = None
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._events = events
        self._policy = policy or RestartPolicy()
        self.board = EndpointBoard()
        self._link = ClusterLink(config.cluster)
        self._server = self._link.server()
        self._server.add(
            controller_pb2_grpc.add_ControllerServicer_to_server,
            ControllerServicer(self.board),
            controller_pb2.DESCRIPTOR.services_by_name["Controller"],
        )
        first_epoch = int(time.time())  # later than any epoch of an earlier controller, also after Ray's head was lost
        slots = [Slot(pool, index) for pool in Pool for index in range(config.num_workers(pool))]
        self._keepers = [self._keeper(slot, first_epoch) for slot in slots]

    async def start(self, address: Address) -> Address:
        """Serve WatchEndpoints; return the bound address. Raises InvalidConfig when it cannot be bound."""
        bound = await self._server.start(address)
        await self._server.set_serving(True)
        self._events.emit("listening", message=str(bound), ray_folder=str(self._cluster.folder or ""))
        return bound

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the pools filled until `stop` is set. Raises WorkerGivenUp when a pool can never be filled."""
        await self._adopt()
        tasks = {asyncio.create_task(keeper.run()): keeper for keeper in self._keepers}
        all_ready = asyncio.create_task(self._wait_all_ready())
        warming = asyncio.create_task(keep_pairs_warm(self.board, self._prefill_handle))
        warming.add_done_callback(_log_failure)  # nothing depends on it
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stopping.done():
                await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task.done()]:
                    self._lose(tasks.pop(task), task, started=all_ready.done(), others=[k.slot.pool for k in tasks.values()])
        finally:
            pending: list[asyncio.Task[Any]] = [*tasks, all_ready, warming, stopping]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def stop(self) -> None:
        """Drain and stop prefill workers, then decode workers, then the server; with keep_workers, leave the workers alone."""
        self._events.emit("stopping")
        await self._server.drain()
        if not self._config.keep_workers:
            for keeper in self._keepers:
                if keeper.handle is not None:
                    self.board.set(keeper.handle.name, EndpointState.DRAINING)
            for pool in Pool:  # prefill first: what it ships, decode must still be there to take
                keepers = [keeper for keeper in self._keepers if keeper.slot.pool is pool]
                await asyncio.gather(*(keeper.stop(self._config.grace_s) for keeper in keepers))
        self.board.close()
        await self._server.stop(grace_s=0.5)
        self._events.emit("stopped")

    def _prefill_handle(self, worker_id: str) -> ActorHandle | None:
        return next((keeper.handle for keeper in self._keepers if keeper.slot.worker_id == worker_id), None)

    def _keeper(self, slot: Slot, first_epoch: int) -> SlotKeeper:
        return SlotKeeper(
            slot,
            first_epoch=first_epoch,
            spawn=self._spawn,
            board=self.board,
            events=self._events,
            policy=self._policy,
            start_timeout_s=self._config.start_timeout_s,
            hang_timeout_s=self._config.hang_timeout_s,
            link=self._link,
        )

    def _spawn(self, name: ActorName) -> ActorHandle:
        config = self._config
        resources = ActorResources(
            num_cpus=config.threads_per_worker,
            num_gpus=1 if config.transfer_backend == "nccl" else 0,
            use_pool_label=config.pool_labels,
        )
        environment = actor_environment(config.threads_per_worker, config.transfer_backend, config.log_level, config.log_format)
        environment["SHOAL_METRICS_LISTEN"] = config.metrics_addresses.get(name.slot.worker_id, "")
        return self._cluster.spawn(name, config.worker(name.slot.pool, name.slot.worker_id, name.epoch), resources, environment)

    async def _adopt(self) -> None:
        """Take over ready actors of our slots and configuration; end every other actor of ours."""
        by_slot = {keeper.slot: keeper for keeper in self._keepers}
        for handle in sorted(self._cluster.find_actors(), key=lambda found: found.name.epoch, reverse=True):
            keeper = by_slot.get(handle.name.slot)
            told = await self._ask(handle) if keeper is not None and keeper.handle is None else {}
            wanted = self._config.worker(handle.name.slot.pool, handle.name.slot.worker_id, handle.name.epoch)
            if keeper is not None and told and json.loads(str(told["config"])) == json.loads(json.dumps(wanted.to_dict())):
                keeper.adopt(handle, worker_pb2.WorkerDescription.FromString(bytes.fromhex(str(told["ready"]))))
            else:
                _log.warning("ending %s: left by an earlier controller and not usable as it is", handle.name)
                handle.kill()

    @staticmethod
    async def _ask(handle: ActorHandle) -> dict[str, object]:
        try:
            async with asyncio.timeout(_ADOPTION_TIMEOUT_S):
                return await handle.describe()
        except (TimeoutError, Unavailable) as error:
            _log.warning("%s does not describe itself: %s", handle.name, error or "no answer")
            return {}

    async def _wait_all_ready(self) -> None:
        for keeper in self._keepers:
            await keeper.ready.wait()
        self._events.emit("all-ready")

    def _lose(self, keeper: SlotKeeper, task: "asyncio.Task[None]", *, started: bool, others: list[Pool]) -> None:
        """A keeper has ended: fatal at start and when its pool has no other, else only reported."""
        error = task.exception()
        if not isinstance(error, WorkerGivenUp):
            raise error or RuntimeError(f"the keeper of {keeper.slot.worker_id} ended")
        self._events.emit("failed", keeper.slot.worker_id, str(error))
        if not started or keeper.slot.pool not in others:
            raise error
        _log.error("%s; going on without it", error)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("task %s failed", task.get_name(), exc_info=error)
