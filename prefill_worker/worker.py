"""A prefill worker: the lower layers, step loop, transfer client and its own gRPC server, in one asyncio process. Knows no Ray.

start: open the model → listen, NOT_SERVING → load → SERVING
stop:  NOT_SERVING → let tasks be acknowledged for the grace → end the rest → close transfers, server, step thread
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import psutil

from shoal.config.logs import log_event
from shoal.config.worker import Pool, WorkerConfig
from shoal.engine.affinity import keep_to_cpus
from shoal.engine.health import keep_health
from shoal.engine.holdings import GROUPS
from shoal.engine.load_report import report_queue, work_report
from shoal.engine.resident import Resident, fingerprint_of, load_resident, load_vision, open_for, shared_memory_for
from shoal.engine.vision import VisionEncoder
from shoal.engine.weights import HeldLayers
from shoal.errors import AlreadyExists, InternalError, InvalidConfig, Unavailable
from shoal.kv_transfer import DecodeTarget, TransferClient
from shoal.kv_transfer.faults import Faults
from shoal.model_files import ModelFiles
from shoal.pb.internal.v1 import worker_pb2, worker_pb2_grpc
from shoal.pb.v1 import shoal_pb2
from shoal.placement.stall import Standing
from shoal.prefill_worker import metrics
from shoal.prefill_worker.held import deepest_layers
from shoal.prefill_worker.lifecycle import TaskRunner
from shoal.prefill_worker.servicer import PrefillServicer
from shoal.prefill_worker.spec import read_spec
from shoal.prefill_worker.step_loop import PrefillStepLoop
from shoal.prefill_worker.task import PrefillTask
from shoal.rpc import Address, ClusterLink
from shoal.rpc.fingerprints import fingerprint_to_pb
from shoal.types import ModelShape

_log = logging.getLogger(__name__)
_LAST_WORDS_S = 1.0  # for what streams that have ended still have to deliver


class PrefillWorker:
    """One per process. Everything runs on the event loop that called `start`; tensors are computed in the step thread."""

    def __init__(
        self,
        config: WorkerConfig,
        progress: Callable[[int, int], None] | None = None,
        *,
        layer_done: Callable[[int], object] | None = None,
    ) -> None:
        if config.pool is not Pool.PREFILL:
            raise InvalidConfig(f"worker {config.worker_id} is configured for pool {config.pool}, not for prefill")
        self.config = config
        self.address = ""  # host:port, once bound
        self._progress = progress
        self._faults = Faults.from_environment(allowed=config.chaos)
        by_layer = (lambda layer: self._faults.hit(f"layer-{layer}")) if config.chaos else None
        self._layer_done = layer_done or by_layer
        self._loaded: _Loaded | None = None
        self._draining = False

    async def start(self) -> str:
        """Listen, load, serve. Returns host:port. Raises InvalidConfig when the configuration cannot work."""
        config, link = self.config, ClusterLink(self.config.cluster)
        keep_to_cpus(config.cpus)
        server = link.server()
        self._server = server
        self._model: ModelFiles = await asyncio.to_thread(open_for, config)
        self._fingerprint = fingerprint_of(self._model, config)
        memory = await asyncio.to_thread(shared_memory_for, self._model, config)
        self._transfers = TransferClient(
            worker_id=config.worker_id,
            epoch=config.epoch,
            fingerprint=self._fingerprint,
            config=config.transfer,
            faults=self._faults,
            connect=link.open_channel,
            memory=memory,
        )
        service = worker_pb2.DESCRIPTOR.services_by_name["PrefillWorker"]
        server.add(worker_pb2_grpc.add_PrefillWorkerServicer_to_server, PrefillServicer(self), service)
        server.add_sessions()
        try:
            self.address = str(await server.start(Address(config.host, config.port)))
            full, kv_only = deepest_layers(config.allowed_policies(self.shape.num_layers), self.shape.num_layers)
            held = HeldLayers(full, kv_only, embedding=True, head=False)
            resident = await asyncio.to_thread(load_resident, self._model, config, held, self._progress, memory)
            vision = await asyncio.to_thread(load_vision, self._model, config, metrics.IMAGE_SECONDS.observe)
        except BaseException:
            await self._transfers.close()
            await server.stop()
            raise
        self._loaded = self._assemble(resident, vision)
        await server.set_serving(True)
        loaded, patience_s = self._loaded, config.stall_timeout_s
        self._health = asyncio.create_task(keep_health(lambda: loaded.standing, server.set_serving, patience_s), name="health")
        log_event(
            _log, logging.INFO, "worker ready", epoch=config.epoch, address=self.address,
            layers=resident.num_layers_held, blocks=resident.blocks.num_blocks,
        )  # fmt: skip
        return self.address

    async def stop(self, grace_s: float = 0.0) -> None:
        """After `start`: refuse new tasks, let running ones be acknowledged for `grace_s` seconds, end the rest."""
        self._draining = True
        await self._server.drain()
        if self._loaded is not None:
            await self._loaded.runner.drain(grace_s)
        await self._transfers.close()
        await self._server.stop(min(grace_s, _LAST_WORDS_S))
        if self._loaded is not None:
            self._loaded.stepping.cancel()
            self._health.cancel()
            await asyncio.to_thread(self._loaded.steps.close)
            if self._loaded.vision is not None:
                await asyncio.to_thread(self._loaded.vision.close)

    async def wait_for_termination(self) -> None:
        """Return when the server has stopped."""
        await self._server.wait_for_termination()

    @property
    def shape(self) -> ModelShape:
        return self._model.config.shape

    def submit(self, message: worker_pb2.PrefillRequest, deadline_s: float) -> PrefillTask:
        """Check a task and take it in. Raises InvalidRequest, Mismatch, AlreadyExists; Unavailable while loading or stopping."""
        if self._draining or self._loaded is None:
            state = "is stopping" if self._draining else "is still loading its model"
            raise Unavailable(f"prefill worker {self.config.worker_id} {state}; use another")
        spec = read_spec(message, self.config, self.shape, self._fingerprint, self._model.vision)
        if any(task.spec.attempt_id == spec.attempt_id for task in self._loaded.runner.tasks):
            raise AlreadyExists(f"attempt {spec.attempt_id} is being prefilled already; reserve again to retry")
        return self._loaded.runner.submit(spec, deadline_s)

    async def prewarm(self, target: DecodeTarget) -> None:
        """Connect to a decode worker before its first transfer. Raises Unavailable, Mismatch."""
        await self._transfers.prewarm(target)

    def describe(self) -> worker_pb2.WorkerDescription:
        """Who this is and what it may be asked."""
        return worker_pb2.WorkerDescription(
            worker_id=self.config.worker_id,
            pool=str(self.config.pool),
            epoch=self.config.epoch,
            address=self.address,
            fingerprint=fingerprint_to_pb(self._fingerprint),
            allowed_visibilities=[str(policy) for policy in self.config.allowed_policies(self.shape.num_layers)],
            max_boundary_tokens=self.config.max_boundary_tokens,
        )

    def load(self) -> shoal_pb2.WorkerLoad:
        """What it holds and what it has yet to do."""
        load = shoal_pb2.WorkerLoad(worker_id=self.config.worker_id, pool=str(self.config.pool))
        load.resident_bytes = psutil.Process().memory_info().rss
        load.num_staging_in_use = self._transfers.num_staging_in_use
        load.num_staging_quarantined = self._transfers.num_staging_quarantined
        if self._loaded is not None:
            self._loaded.fill(load)
        return load

    def work(self) -> worker_pb2.WorkReport:
        """The same, and what it has done since it started."""
        return work_report(self.load(), self._loaded.steps.tally if self._loaded is not None else None)

    def _assemble(self, resident: Resident, vision: VisionEncoder | None) -> "_Loaded":
        steps = PrefillStepLoop(resident, self.config, layer_done=self._layer_done)
        runner = TaskRunner(self.config, resident, self._transfers, steps, vision)
        blocks, holdings = resident.blocks, runner.holdings
        metrics.TOTAL_BLOCKS.set(blocks.num_blocks)
        metrics.USED_BLOCKS.set_function(lambda: blocks.num_used)
        for group in GROUPS:
            metrics.GROUP_BLOCKS.labels(group).set_function(partial(holdings.num_blocks_of, group))
        metrics.CACHED_BLOCKS.set_function(lambda: blocks.num_cached)
        metrics.HOLDING_REQUESTS.set_function(lambda: holdings.num_holders)
        metrics.WAITING_REQUESTS.set_function(lambda: holdings.num_waiting)
        stepping = asyncio.create_task(steps.run(), name="prefill-steps")
        stepping.add_done_callback(self._stepping_ended)
        return _Loaded(resident, steps, runner, stepping, vision)

    def _stepping_ended(self, stepping: asyncio.Task[None]) -> None:
        """Without its step loop the worker can do nothing: say so, and let nobody wait."""
        if stepping.cancelled() or (error := stepping.exception()) is None:
            return
        _log.critical("the step loop of %s has ended; restart the worker", self.config.worker_id, exc_info=error)
        self._draining = True
        self._ending = asyncio.create_task(self._server.drain())
        for waiting in self._loaded.runner.tasks if self._loaded else ():
            waiting.end(InternalError("the worker's step loop has ended"))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The parts that exist once the model is in memory."""

    resident: Resident
    steps: PrefillStepLoop
    runner: TaskRunner
    stepping: asyncio.Task[None]
    vision: VisionEncoder | None

    @property
    def standing(self) -> Standing:
        """What health is judged by."""
        holdings = self.runner.holdings
        return Standing(
            num_moves=self.steps.num_steps + holdings.num_released,
            num_running=self.steps.num_running,
            num_waiting=holdings.num_waiting,
            num_transferring=sum(task.outgoing is not None for task in self.runner.tasks),
        )

    def fill(self, load: shoal_pb2.WorkerLoad) -> None:
        """Add what only a loaded worker has."""
        holdings, tasks = self.runner.holdings, self.runner.tasks
        load.num_running_reqs = self.steps.num_running
        outstanding = ((task.spec.turn, task.num_outstanding_token_layers) for task in tasks)
        report_queue(load, holdings, self.steps.rate, outstanding)
        load.num_transfers_in_flight = sum(task.outgoing is not None for task in tasks)
        load.num_layers_held = self.resident.num_layers_held
        load.weight_bytes_read = self.resident.report.bytes_read
