"""The only Ray driver: fills both pools, adopts what it finds running, publishes endpoints, changes pools, stops all in order."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool
from shoal.controller.autoscaler import Autoscaler
from shoal.controller.backoff import RestartPolicy
from shoal.controller.endpoints import EndpointBoard, EndpointState
from shoal.controller.events import EventWriter
from shoal.controller.keeper import SlotKeeper
from shoal.controller.machines import FixedMachines, Held, Machines
from shoal.controller.names import ActorName, Slot
from shoal.controller.pools import PoolChange, Pools
from shoal.controller.prewarm import PairWarmer
from shoal.controller.ray_cluster import ActorHandle, RayCluster, actor_environment
from shoal.controller.rollout import RollingRestart
from shoal.controller.room import check_room, check_size, worker_resources
from shoal.controller.servicer import ControllerServicer
from shoal.controller.sizes import SizeBook
from shoal.errors import AlreadyExists, InvalidRequest, Unavailable
from shoal.pb.internal.v1 import controller_pb2, controller_pb2_grpc, worker_pb2
from shoal.placement.service import ServiceModel
from shoal.rpc import Address, ClusterLink

_log = logging.getLogger(__name__)

_ADOPTION_TIMEOUT_S = 10.0


class Controller:
    """`start`, then `run` until the given stop, then `stop`. `set_pool_sizes` and `begin_rolling_restart` change it meanwhile."""

    def __init__(
        self,
        config: ServeConfig,
        cluster: RayCluster,
        events: EventWriter,
        policy: RestartPolicy | None = None,
        machines: Machines | None = None,
        service: ServiceModel | None = None,
    ) -> None:
        self.config = config
        self.events = events
        self.board = EndpointBoard()
        self._cluster = cluster
        self._policy = policy or RestartPolicy()
        self._link = ClusterLink(config.cluster)
        self._server = self._link.server()
        self._server.add(
            controller_pb2_grpc.add_ControllerServicer_to_server,
            ControllerServicer(self),
            controller_pb2.DESCRIPTOR.services_by_name["Controller"],
        )
        self.pools = Pools(self._keeper, first_epoch=int(time.time()))  # also after Ray's head, and its actors, were lost
        self._sizes = SizeBook(cluster, config)
        self._warmer = PairWarmer(self.board, self._prefill_handle)
        self.autoscaler: Autoscaler | None = None
        if any(config.autoscale_bounds(pool) for pool in config.pools):
            self.autoscaler = Autoscaler(config, self, self.board, self._link, machines or FixedMachines(), service)
        self._all_ready = False
        self._restart: asyncio.Task[None] | None = None

    async def start(self, address: Address, health_listen: str = "") -> Address:
        """Serve the Controller's calls; return the bound address. Raises InvalidConfig when it cannot be bound.

        `health_listen`: health alone on a port of its own, without TLS.
        """
        bound = await self._server.start(address)
        if health_listen:
            await self._server.start_health(Address.parse(health_listen, "the address of health"))
        await self._server.set_serving(True)
        transfer = self.config.kv_backend if not self.config.colocated else ""
        self.events.emit("listening", message=str(bound), transfer=transfer)
        return bound

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the pools filled until `stop` is set. Raises WorkerGivenUp when a pool can never be filled."""
        await self._adopt()
        work = [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(self._watch_failures()),
        ]
        aside: list[asyncio.Task[Any]] = [asyncio.create_task(self._wait_all_ready()), asyncio.create_task(self._warmer.run())]
        if self.autoscaler is not None:
            aside.append(asyncio.create_task(self.autoscaler.run(), name="autoscaling"))
        for task in aside[1:]:
            task.add_done_callback(_log_failure)  # nothing depends on it
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            pending: list[asyncio.Task[Any]] = [*work, *aside, *([self._restart] if self._restart else [])]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def stop(self) -> None:
        """Drain and stop prefill workers, then decode workers, then the server; with keep_workers, leave the workers alone."""
        self.events.emit("stopping")
        await self._server.drain()
        keepers = self.pools.keepers()
        await self.pools.close(self.config.grace_s)
        if not self.config.keep_workers:
            for keeper in keepers:
                if keeper.handle is not None:
                    self.board.set(keeper.handle.name, EndpointState.DRAINING)
            for pool in Pool:  # prefill first: what it ships, decode must still be there to take
                own = [keeper for keeper in keepers if keeper.slot.pool is pool]
                await asyncio.gather(*(keeper.stop(self.config.grace_s) for keeper in own))
            self._sizes.forget()
        self.board.close()
        await self._server.stop(grace_s=0.5)
        self.events.emit("stopped")

    def set_pool_sizes(
        self, sizes: Mapping[Pool, int], *, drain_s: float | None = None, allow_pending: bool = False
    ) -> PoolChange:
        """Order pools to have so many workers, and return at once with what that set going (see `settled`).

        The one way to scale, whoever asks. Raises InvalidConfig for a size no pool can have, CapacityExceeded when there is no
        room for it (unless `allow_pending`), AlreadyExists during a rolling restart.
        """
        self.check_sizes(sizes, allow_pending=allow_pending)
        drain_s = self.config.grace_s if drain_s is None else drain_s
        changes = [self.pools.set_size(pool, size, drain_s) for pool, size in sizes.items()]
        self._sizes.write(self.pools.desired)
        return PoolChange(
            tuple(keeper for change in changes for keeper in change.started),
            tuple(keeper for change in changes for keeper in change.retired),
        )

    def check_sizes(self, sizes: Mapping[Pool, int], *, allow_pending: bool = False) -> None:
        """Raise what `set_pool_sizes` would, and change nothing."""
        if not sizes:
            raise InvalidRequest("name the size of at least one pool")
        if self._restart is not None:
            raise AlreadyExists("a rolling restart is under way; scale when it is done")
        for pool, size in sizes.items():
            check_size(self.config, pool, size)
        if not allow_pending:
            more = {pool: max(0, size - len(self.pools.keepers(pool))) for pool, size in sizes.items()}
            check_room(self.config, self._cluster, more, len(self.pools.keepers()))

    def num_workers(self, pool: Pool) -> int:
        """Those that are to stay, ready or not."""
        return len(self.pools.keepers(pool))

    def held(self, pool: Pool) -> Held:
        """Where they are."""
        return self.pools.held(pool)

    async def settled(self, change: PoolChange) -> None:
        """Return once what was started is ready and its pairs are warm, and what was retired is gone. Raises WorkerGivenUp."""
        await asyncio.gather(self._warm(change.started), self.pools.emptied(change.retired))

    def begin_rolling_restart(
        self, pools: Sequence[Pool], *, surge: int = 1, drain_s: float | None = None
    ) -> "asyncio.Task[None]":
        """Replace every worker of these pools; the task ends when all are replaced, or fails with the first that cannot start.

        The one way to restart workers in order, whoever asks. Raises InvalidRequest, CapacityExceeded, AlreadyExists.
        """
        self.check_restart(pools, surge)
        plan = RollingRestart(tuple(pools), surge, self.config.grace_s if drain_s is None else drain_s)
        task = self._restart = asyncio.create_task(plan.run(self.pools, self._warm), name="rolling restart")
        task.add_done_callback(self._restarted)
        return task

    def check_restart(self, pools: Sequence[Pool], surge: int) -> None:
        """Raise what `begin_rolling_restart` would, and change nothing."""
        if self._restart is not None:
            raise AlreadyExists("a rolling restart is under way already")
        for pool in pools:
            size = len(self.pools.keepers(pool))
            if surge == 0 and size < 2:
                raise InvalidRequest(f"the {pool} pool has one worker: with no surge nobody would serve meanwhile; use --surge 1")
            check_room(self.config, self._cluster, {pool: min(surge, size)}, len(self.pools.keepers()))

    def _restarted(self, task: "asyncio.Task[None]") -> None:
        self._restart = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the rolling restart stopped: %s", error)

    async def _warm(self, keepers: Sequence[SlotKeeper]) -> None:
        """Wait until each takes traffic and none of its pairs is still to be made. Raises WorkerGivenUp."""

        async def one(keeper: SlotKeeper) -> None:
            await self.pools.filled([keeper])
            began_at = asyncio.get_running_loop().time()
            await self._warmer.settled(keeper.worker)
            seconds = asyncio.get_running_loop().time() - began_at
            self.events.emit("warm", keeper.slot.worker_id, seconds=seconds)

        outcomes = await asyncio.gather(*map(one, keepers), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _prefill_handle(self, worker_id: str) -> ActorHandle | None:
        keeper = self.pools.keeper_of(worker_id)
        return keeper.handle if keeper is not None else None

    def _keeper(self, slot: Slot, first_epoch: int) -> SlotKeeper:
        return SlotKeeper(
            slot,
            first_epoch=first_epoch,
            spawn=self._spawn,
            board=self.board,
            events=self.events,
            policy=self._policy,
            start_timeout_s=self.config.start_timeout_s,
            hang_timeout_s=self.config.hang_timeout_s,
            link=self._link,
        )

    def _spawn(self, name: ActorName) -> ActorHandle:
        config = self.config
        environment = actor_environment(config.threads_per_worker, config.transfer_backend, config.log_level, config.log_format)
        environment["SHOAL_METRICS_LISTEN"] = config.metrics_address(name.slot.worker_id)
        worker = config.worker(name.slot.pool, name.slot.worker_id, name.epoch)
        return self._cluster.spawn(name, worker, worker_resources(config), environment)

    async def _adopt(self) -> None:
        """Take over ready actors of our configuration, drain those too many, end every other actor of ours; fill the rest."""
        sizes = self._sizes.read()
        taken: dict[Pool, list[SlotKeeper]] = {pool: [] for pool in Pool}
        found = sorted(self._cluster.find_actors(), key=lambda handle: (handle.name.slot.index, -handle.name.epoch))
        for handle in found:
            slot = handle.name.slot
            told = await self._ask(handle) if all(keeper.slot != slot for keeper in taken[slot.pool]) else {}
            wanted = self.config.worker(slot.pool, slot.worker_id, handle.name.epoch)
            if told and json.loads(str(told["config"])) == json.loads(json.dumps(wanted.to_dict())):
                keeper = self._keeper(slot, handle.name.epoch)
                keeper.adopt(handle, worker_pb2.WorkerDescription.FromString(bytes.fromhex(str(told["ready"]))))
                taken[slot.pool].append(keeper)
                self.pools.keep(keeper)
            else:
                _log.warning("ending %s: left by an earlier controller and not usable as it is", handle.name)
                handle.kill()
        for pool, size in sizes.items():
            self.pools.set_size(pool, size, self.config.grace_s)

    @staticmethod
    async def _ask(handle: ActorHandle) -> dict[str, object]:
        try:
            async with asyncio.timeout(_ADOPTION_TIMEOUT_S):
                return await handle.describe()
        except (TimeoutError, Unavailable) as error:
            _log.warning("%s does not describe itself: %s", handle.name, error or "no answer")
            return {}

    async def _wait_all_ready(self) -> None:
        await self.pools.filled(self.pools.keepers())
        self._all_ready = True
        self.events.emit("all-ready")

    async def _watch_failures(self) -> None:
        """Workers that cannot be started: fatal at start and when the pool has no other, else only reported."""
        while True:
            keeper, error = await self.pools.next_given_up()
            is_fatal = not self._all_ready or not self.pools.keepers(keeper.slot.pool)
            self.events.emit("failed", keeper.slot.worker_id, str(error), fatal=is_fatal)
            if is_fatal:
                raise error
            _log.error("%s; going on without it", error)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("task %s failed", task.get_name(), exc_info=error)
