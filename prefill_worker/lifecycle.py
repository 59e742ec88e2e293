"""The life of each task on a prefill worker, from queue to end. Knows states and their order; no protos, no tensors' content.

A task is owned by one asyncio task. It opens its transfer while it waits for room, computes before decode has accepted, sends
nothing before that, and gives its blocks back in one place: not before the step that uses them and every send that was issued
have returned.
"""

import asyncio
import logging
from functools import partial

from shoal.config.logs import log_event, loggable
from shoal.config.worker import WorkerConfig
from shoal.engine.holdings import Holding, HoldingQueue, HoldingSize
from shoal.engine.resident import Resident
from shoal.engine.segment import RequestKv
from shoal.engine.state_store import StateStore, num_state_blocks, state_range
from shoal.engine.vision import PromptImages, VisionEncoder
from shoal.engine.vision.tower import missing_library
from shoal.errors import Cancelled, CapacityExceeded, DeadlineExceeded, InternalError, ShoalError, Unsupported
from shoal.kv_transfer import DecodeTarget, OutgoingTransfer, SentReport, TransferClient
from shoal.placement.prefix_cache import PrefixCache
from shoal.placement.reservation import prefill_reservation
from shoal.prefill_worker import metrics
from shoal.prefill_worker.prefixes import PrefillPrefixes
from shoal.prefill_worker.source import PrefillSource
from shoal.prefill_worker.spec import PrefillSpec
from shoal.prefill_worker.step_loop import PrefillStepLoop, Work
from shoal.prefill_worker.task import PrefillTask, TaskState
from shoal.rpc.tracing import trace_past, trace_states

_log = logging.getLogger(__name__)


class TaskRunner:
    """Starts, watches and ends tasks. Belongs to the event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        resident: Resident,
        transfers: TransferClient,
        steps: PrefillStepLoop,
        vision: VisionEncoder | None = None,
    ) -> None:
        self._config = config
        self._vision = vision
        self._num_unseen = 0  # tasks whose images are being seen, or wait for it
        self._resident = resident
        self._transfers = transfers
        self._steps = steps
        self._tasks: dict[PrefillTask, asyncio.Task[None]] = {}
        cache = PrefixCache(resident.blocks, config.block_size, metrics.EVICTED_BLOCKS.inc) if config.prefix_cache else None
        self._prefixes = PrefillPrefixes(cache, resident.pool) if cache is not None else None
        self.holdings = HoldingQueue(
            resident.blocks,
            config.block_size,
            max_holders=config.max_running_requests,
            max_queued=config.max_queued,
            cache=cache,
        )

    @property
    def tasks(self) -> list[PrefillTask]:
        """Every task that has not given everything back."""
        return list(self._tasks)

    def submit(self, spec: PrefillSpec, deadline_s: float) -> PrefillTask:
        """Take a task in; it may last until its deadline, waiting for blocks included."""
        self._steps.tally.num_arrived += 1
        task = PrefillTask(spec)
        living = asyncio.create_task(self._live(task, deadline_s), name=f"prefill-{spec.attempt_id}")
        self._tasks[task] = living
        living.add_done_callback(lambda _: self._tasks.pop(task))
        return task

    async def drain(self, grace_s: float) -> None:
        """Let tasks be computed, sent and acknowledged for so long, then end the rest. Returns when all has been given back."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=grace_s)
        for task in self.tasks:
            task.end(Cancelled("the prefill worker is stopping"))
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _live(self, task: PrefillTask, deadline_s: float) -> None:
        late = DeadlineExceeded(f"prefill did not finish within {deadline_s:.1f} s; allow more time or shorten the prompt")
        deadline = asyncio.get_running_loop().call_later(deadline_s, task.end, late)
        holding: asyncio.Future[Holding] = asyncio.get_running_loop().create_future()
        working = asyncio.create_task(self._work(task, holding))
        end = await task.ended
        try:
            deadline.cancel()
            if isinstance(end, ShoalError):
                task.answer.set_result(end)  # now: a send to a hung peer may take long to return
            working.cancel()
            await asyncio.wait((working,))
            if isinstance(end, ShoalError) and task.outgoing is not None:
                task.outgoing.cancel(str(end))
            await self._steps.remove(task.spec.attempt_id)
            if task.outgoing is not None:
                await task.outgoing.released()
            try:
                if task.publish is not None and task.computed.is_set():  # not sooner: decode's last messages were waiting
                    task.publish()
            except Exception:  # noqa: BLE001  # not swallowed: logged; a cache that cannot take it in costs nobody his blocks
                _log.exception("what task %s has computed cannot be kept for others", task.spec.attempt_id)
            if holding.done() and not holding.cancelled():
                self.holdings.release(holding.result())
            if self._config.check_blocks:
                self.holdings.check()
        finally:
            task.move(_END_STATES.get(type(end), TaskState.FAILED))
            self._measure(task)
            self._journal(task, end)
            if not task.answer.done():
                task.answer.set_result(end)

    async def _work(self, task: PrefillTask, held: "asyncio.Future[Holding]") -> None:
        """Room, then compute and transfer side by side. Ends the task, well or with an error."""
        spec, resident = task.spec, self._resident
        source = PrefillSource(resident.pool)
        # at once: decode waits for the opening no longer than its lease, and this worker's room may take longer to come
        opening = asyncio.create_task(self._open(task, source))
        try:
            kept = state_range(spec.plan)
            prefixes = self._prefixes
            keys = prefixes.keys(spec) if prefixes is not None else None
            query = prefixes.query(spec, keys) if prefixes is not None and keys is not None else None
            images = await self._see(spec)
            holding = await self.holdings.reserve(spec.layout, self._size(spec, len(kept)), spec.turn, query)
            held.set_result(holding)
            task.num_cached = holding.num_cached_tokens
            kv = RequestKv.of(holding.tables, images)
            states = StateStore(resident.pool, holding.state_blocks, kept, resident.shape.hidden_size) if kept else None
            task.move(TaskState.HOLDING)
            log_event(
                _log, logging.DEBUG, "reservation made", visibility=spec.layout.visibility, prefill_tokens=len(spec.token_ids),
                queue_s=task.seconds(TaskState.QUEUED, TaskState.HOLDING),
            )  # fmt: skip
            source.hold(kv, states)
            if prefixes is not None and keys is not None:
                prefixes.take_in(spec, holding, states)
                self.holdings.release_sources(holding)
                if not spec.is_background:
                    task.publish = partial(prefixes.publish, spec, keys, kv, states)
            self._steps.add(Work(task, kv, states))
            report = await (await asyncio.shield(opening)).wait()
            await task.computed.wait()  # the acknowledgement can overtake the end of the step that sent the last entry
            metrics.SENT_BYTES.inc(report.payload_bytes)
            trace_past("transfer sent", report.seconds, payload_bytes=report.payload_bytes)
            log_event(
                _log,
                logging.DEBUG,
                "transfer finished",
                payload_bytes=report.payload_bytes,
                entries=report.num_entries,
                seconds=report.seconds,
            )
            task.end(report)
        except ShoalError as error:
            task.end(error)
        except Exception:  # noqa: BLE001  # not swallowed: logged, and the task ends with an error
            _log.exception("task %s failed", spec.attempt_id)
            task.end(InternalError("the prefill task failed"))
        finally:
            opening.cancel()
            await asyncio.wait((opening,))
            opening.cancelled() or opening.exception()  # the task has been told

    async def _see(self, spec: PrefillSpec) -> PromptImages | None:
        """What the prompt's images come to. Before anything is held: a damaged one is its request's error alone."""
        if not spec.images:
            return None
        if self._vision is None:
            raise Unsupported(
                missing_library() or f"prefill worker {self._config.worker_id} was started without what sees images"
            )
        if self._num_unseen > self._config.max_queued:  # before work is done: each of them also keeps its files in memory
            raise CapacityExceeded(f"{self._num_unseen} requests wait for their images to be seen; retry later", 1.0)
        self._num_unseen += 1
        try:
            features = await self._vision.encode_soon(spec.images, spec.cache_salt)
        finally:
            self._num_unseen -= 1
        return PromptImages.of(self._vision.config, [image.span for image in spec.images], features)

    async def _open(self, task: PrefillTask, source: PrefillSource) -> OutgoingTransfer:
        """Open the transfer and hand it to the task, which ends at once when decode refuses it."""
        spec = task.spec
        target = DecodeTarget(spec.decode_address, spec.decode_worker_id, spec.decode_epoch)
        try:
            outgoing = await self._transfers.open(target, spec.handle, spec.plan, source)
        except ShoalError as error:
            task.end(error)
            raise
        task.attach(outgoing)
        return outgoing

    def _size(self, spec: PrefillSpec, num_states: int) -> HoldingSize:
        resident, split = self._resident, spec.layout.split
        size = prefill_reservation(
            resident.shape, self._config.dtype, self._config.block_size, spec.layout.visibility, split.num_prompt_tokens
        )
        num_blocks = num_state_blocks(num_states, resident.shape.hidden_size, resident.pool.data[0].numel())
        return HoldingSize(size.num_lower_slots, size.num_upper_slots, num_blocks)

    def _measure(self, task: PrefillTask) -> None:
        metrics.ENDED_REQUESTS.labels(str(task.state)).inc()
        if task.state is TaskState.SENT:
            metrics.QUEUE_SECONDS.observe(task.seconds(TaskState.QUEUED, TaskState.COMPUTING))
            metrics.COMPUTE_SECONDS.observe(task.seconds(TaskState.COMPUTING, TaskState.COMPUTED))
            metrics.AFTER_COMPUTE_SECONDS.observe(task.seconds(TaskState.COMPUTED, TaskState.SENT))

    def _journal(self, task: PrefillTask, end: SentReport | ShoalError) -> None:
        trace_states("prefill task", task.times, worker_id=self._config.worker_id, attempt_id=task.spec.attempt_id)
        has_failed = task.state is TaskState.FAILED
        fields = {"end": task.state, "error": loggable(end) if isinstance(end, ShoalError) else None}
        if has_failed and task.outgoing is not None:
            log_event(_log, logging.WARNING, "transfer failed", **fields)
        held_s = task.seconds(TaskState.HOLDING, task.state) if TaskState.HOLDING in task.times else None
        what = "ended without a reservation" if held_s is None else "reservation ended"
        log_event(_log, logging.WARNING if has_failed else logging.DEBUG, what, held_s=held_s, **fields)


_END_STATES: dict[type, TaskState] = {SentReport: TaskState.SENT, Cancelled: TaskState.CANCELLED}
