"""The workers this router knows, kept up to date from an endpoint source and from the workers' own reports."""

import asyncio
import logging
from collections.abc import Callable, Iterable

import grpc

from shoal.errors import ShoalError
from shoal.pb.internal.v1 import controller_pb2, worker_pb2
from shoal.pb.v1 import shoal_pb2
from shoal.placement.balance import WorkerLoadView
from shoal.router.endpoints import EndpointSource
from shoal.router.instruments import READY_WORKERS
from shoal.router.worker import DECODE, PREFILL, Worker
from shoal.rpc import ClusterLink

_log = logging.getLogger(__name__)
_REPORT_TIMEOUT_S = 1.0


class Registry:
    """Known workers by (id, epoch). `on_change` runs after each new list."""

    def __init__(
        self,
        *,
        revision: str,
        on_change: Callable[[], None] = lambda: None,
        link: ClusterLink | None = None,
        decode_alone: bool = False,
    ) -> None:
        """`decode_alone`: decode workers may serve while no prefill worker is live."""
        self._decode_alone = decode_alone
        self._link = link or ClusterLink()
        self._revision = revision  # of the model whose tokenizer this router uses
        self._on_change = on_change
        self._workers: dict[tuple[str, int], Worker] = {}
        self._retired: set[Worker] = set()
        self._refused: set[tuple[str, int]] = set()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Every listed worker, whatever its state."""
        return tuple(self._workers.values())

    def pool(self, pool: str) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.pool == pool]

    @property
    def can_serve(self) -> bool:
        """Whether some ready decode worker has a prefill worker of equal fingerprint and common visibility, or needs none."""
        ready = {pool: [w for w in self.pool(pool) if w.state == "ready"] for pool in (PREFILL, DECODE)}
        if any(self._decode_alone or worker.is_colocated for worker in ready[DECODE]):
            return True
        return any(_compatible(prefill.view(), decode.view()) for prefill in ready[PREFILL] for decode in ready[DECODE])

    async def follow(self, source: EndpointSource) -> None:
        """Apply every list of a source, for ever."""
        async for endpoints in source.lists():
            self.update(endpoints)
            await self._close_retired()

    def update(self, endpoints: controller_pb2.Endpoints) -> None:
        """Take a whole list. Workers that left it, or died, take no more requests; the dead ones' requests end now."""
        listed: dict[tuple[str, int], Worker] = {}
        for endpoint in endpoints.endpoints:
            worker = self._known(endpoint.worker)
            if worker is None:
                continue
            listed[worker.key] = worker
            if endpoint.state == "dead":
                worker.lose("died")
            elif worker.state != "dead":
                worker.state = endpoint.state
        epochs = {endpoint.worker.worker_id: endpoint.worker.epoch for endpoint in endpoints.endpoints}
        for key, worker in self._workers.items():
            if key not in listed:
                worker.state = "gone"
                self._retired.add(worker)
                if epochs.get(worker.worker_id, worker.epoch) != worker.epoch:
                    worker.lose("was restarted")
        self._workers = listed
        for pool in (PREFILL, DECODE):
            READY_WORKERS.labels(pool).set(sum(worker.state == "ready" for worker in self.pool(pool)))
        self._on_change()

    def _known(self, description: worker_pb2.WorkerDescription) -> Worker | None:
        key = (description.worker_id, description.epoch)
        if (known := self._workers.get(key)) is not None and description.address in ("", known.address):
            return known
        if not description.address or key in self._refused:
            return None
        if description.fingerprint.revision != self._revision:
            self._refused.add(key)
            _log.warning(
                "%s worker %s holds model revision %s, this router's tokenizer is of %s; it gets no requests from here",
                description.pool, description.worker_id, description.fingerprint.revision, self._revision,
            )  # fmt: skip
            return None
        try:
            return Worker(description, self._link.open_channel(description.address))
        except ShoalError as error:
            self._refused.add(key)
            _log.warning("%s worker %s cannot be used: %s", description.pool, description.worker_id, error)
            return None

    async def poll_reports(self, interval_s: float) -> None:
        """Ask every worker for its load again and again; one that does not answer is chosen last."""
        while True:
            await self.reports()
            await self._close_retired()
            await asyncio.sleep(interval_s)

    async def reports(self) -> list[shoal_pb2.WorkerLoad]:
        """The load of every worker that answers now."""
        workers = [worker for worker in self.workers if worker.state in ("ready", "draining")]
        found = await asyncio.gather(*(_report(worker) for worker in workers))
        return [report for report in found if report is not None]

    async def close(self) -> None:
        workers: Iterable[Worker] = {*self._workers.values(), *self._retired}
        self._workers, self._retired = {}, set()
        await asyncio.gather(*(worker.close() for worker in workers))

    async def _close_retired(self) -> None:
        idle = [worker for worker in self._retired if worker.num_holders == 0]
        self._retired.difference_update(idle)
        await asyncio.gather(*(worker.close() for worker in idle))


def _compatible(prefill: WorkerLoadView, decode: WorkerLoadView) -> bool:
    if prefill.fingerprint != decode.fingerprint:
        return False
    num_layers = decode.fingerprint.num_layers
    fitting = [policy.resolve(num_layers) for policy in decode.allowed if policy.depth(num_layers) <= num_layers]
    return any(prefill.allows(visibility) for visibility in fitting)


async def _report(worker: Worker) -> shoal_pb2.WorkerLoad | None:
    num_sent = len(worker.sent)
    try:
        load: shoal_pb2.WorkerLoad = await worker.stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=_REPORT_TIMEOUT_S)
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # always inside a task
            raise
        return None  # the worker was retired and its channel closed meanwhile
    except (grpc.aio.AioRpcError, grpc.aio.UsageError):
        if worker.answers:
            _log.warning("%s worker %s does not answer; it is chosen last until it does", worker.pool, worker.worker_id)
        worker.answers = False
        return None
    worker.reported(load, num_sent)
    return load
