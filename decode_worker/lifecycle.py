"""The life of each request on a decode worker, from queue to end. Knows states and their order; no transport, no tensors.

A request is owned by one task. Whatever ends it (its last token, its caller's leaving, a dead peer, a deadline), that task gives
everything back first, in one place, and then says how it ended.
"""

import asyncio
import logging
from collections.abc import Container

from shoal.config.logs import bind_log_ids, log_event, loggable
from shoal.config.worker import WorkerConfig
from shoal.decode_worker import metrics
from shoal.decode_worker.output import Finish
from shoal.decode_worker.request import DecodeRequest, RequestState
from shoal.decode_worker.reservations import Reservations
from shoal.decode_worker.spec import DecodeSpec
from shoal.decode_worker.step_loop import DecodeStepLoop
from shoal.engine.sampling import ConstraintMaker
from shoal.errors import Cancelled, DeadlineExceeded, InternalError, Preempted, ShoalError
from shoal.kv_transfer import IncomingTransfer
from shoal.placement.plan import Entry, EntryKind
from shoal.rpc.tracing import trace_past, trace_states

_log = logging.getLogger(__name__)


class RequestRunner:
    """Starts, watches and ends requests. Belongs to the event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        reservations: Reservations,
        steps: DecodeStepLoop,
        make_constraint: ConstraintMaker,
    ) -> None:
        self._config = config
        self._reservations = reservations
        self._steps = steps
        self._make_constraint = make_constraint
        self._tasks: dict[DecodeRequest, asyncio.Task[None]] = {}

    @property
    def requests(self) -> list[DecodeRequest]:
        """Every request that has not given everything back."""
        return list(self._tasks)

    def submit(self, spec: DecodeSpec, deadline_s: float) -> DecodeRequest:
        """Take a request in; it may last until its deadline, waiting for blocks included."""
        self._steps.tally.num_arrived += 1
        request = DecodeRequest(spec)
        task = asyncio.create_task(self._live(request, deadline_s), name=f"decode-{spec.attempt_id}")
        self._tasks[request] = task
        task.add_done_callback(lambda _: self._tasks.pop(request))
        return request

    def end_children(self, attempt_id: str, indexes: frozenset[int]) -> None:
        """End some children of a request; with the last one it ends. Harmless for what is not here."""
        for request in self.requests:
            if request.spec.attempt_id == attempt_id and not request.ended.done():
                self._steps.end_children(request, indexes)

    def abort(self, request_ids: Container[str], tenant: str, but_of: str) -> int:
        """End a tenant's requests with these ids, with what they have, but those of one router; how many there were."""
        found = []
        for request in self.requests:
            origin = request.spec.origin
            is_wanted = origin.tenant == tenant and origin.request_id in request_ids and origin.caller != but_of
            if is_wanted and not request.ended.done():
                found.append(request)
        for request in found:
            self._steps.end_children(request, [child.index for child in request.children])
        return len(found)

    async def drain(self, grace_s: float) -> None:
        """Let requests finish for so long, then end the rest. Returns when all has been given back."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=grace_s)
        for request in self.requests:
            request.end(Cancelled("the decode worker is stopping"))
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _live(self, request: DecodeRequest, deadline_s: float) -> None:
        bind_log_ids(attempt_id=request.spec.attempt_id)
        late = DeadlineExceeded(f"the request did not finish within {deadline_s:.1f} s; allow more time or ask for fewer tokens")
        deadline = asyncio.get_running_loop().call_later(deadline_s, request.end, late)
        getting_ready = asyncio.create_task(self._get_ready(request))
        end = await request.ended
        try:
            deadline.cancel()
            getting_ready.cancel()
            await asyncio.wait((getting_ready,))
            await self._steps.remove(request.spec.attempt_id)
            if isinstance(end, Finish | Cancelled | Preempted):
                self._steps.publish(request)
            if request.reservation is not None:
                if isinstance(end, InternalError):
                    self._reservations.discard(request.reservation)
                self._reservations.drop(request.reservation, _words(end))
                self._steps.wake()  # others may have waited for its blocks
            if self._config.check_blocks:
                self._reservations.holdings.check()
        finally:
            request.move(_END_STATES.get(type(end), RequestState.FAILED))
            self._measure(request)
            self._journal(request, end)
            if not request.reserved.done():
                request.reserved.set_result(None)
            request.output.end(end)

    async def _get_ready(self, request: DecodeRequest) -> None:
        """Everything before the first step: room, then the transfer. An error ends the request."""
        loop = asyncio.get_running_loop()

        def arrived(entry: Entry) -> None:
            if request.state is RequestState.RESERVED or entry.kind is EntryKind.DEEP_STATE:  # of the others nobody need hear
                loop.call_soon_threadsafe(self._arrived, request, entry)

        try:
            reservation = await self._reservations.make(request.spec, arrived)
            request.reservation = reservation
            request.move(RequestState.RESERVED)
            request.reserved.set_result(reservation)
            log_event(
                _log, logging.DEBUG, "reservation made", visibility=request.spec.layout.visibility,
                prompt_tokens=request.spec.num_prompt_tokens, plan_bytes=reservation.plan.num_bytes,
                queue_s=request.seconds(RequestState.QUEUED, RequestState.RESERVED),
            )  # fmt: skip
            if request.spec.children[0].sampling.constraint is not None:
                for child in request.children:
                    await asyncio.to_thread(child.constrain, self._make_constraint)
            if reservation.incoming is not None:
                request.received_bytes = await self._receive(reservation.incoming)
            request.move(RequestState.READY)
            self._steps.add(request, reservation)
        except ShoalError as error:
            request.end(error)
        except Exception:  # noqa: BLE001  # not swallowed: logged, and the request ends with an error
            _log.exception("request %s could not be made ready", request.spec.attempt_id)
            request.end(InternalError("the request could not be made ready"))

    async def _receive(self, incoming: IncomingTransfer) -> int:
        """Wait for the transfer; returns the payload's bytes, counted at the channel."""
        try:
            report = await incoming.wait()
        except ShoalError as error:
            log_event(_log, logging.WARNING, "transfer failed", error=loggable(error))
            raise
        metrics.RECEIVED_BYTES.inc(report.payload_bytes)
        trace_past("transfer received", report.seconds, payload_bytes=report.payload_bytes)
        log_event(
            _log,
            logging.DEBUG,
            "transfer finished",
            payload_bytes=report.payload_bytes,
            entries=report.num_entries,
            seconds=report.seconds,
        )
        return report.payload_bytes

    def _arrived(self, request: DecodeRequest, entry: Entry) -> None:
        """An entry is in place: note the first, and hand states that are projected here to the step loop."""
        if request.ended.done() or request.reservation is None:
            return
        if request.state is RequestState.RESERVED:
            request.move(RequestState.RECEIVING)
        if entry.kind is EntryKind.DEEP_STATE and request.spec.layout.visibility.late:
            self._steps.project(request, request.reservation, range(entry.start, entry.stop))

    def _measure(self, request: DecodeRequest) -> None:
        metrics.ENDED_REQUESTS.labels(str(request.state)).inc()
        if request.first_token_at is not None:
            self._steps.tally.answers.add(sum(child.num_sampled for child in request.children))
        moments = [request.times.get(state) for state in (RequestState.QUEUED, RequestState.RESERVED, RequestState.READY)]
        moments.append(request.first_token_at)
        parts = (metrics.QUEUE_SECONDS, metrics.TRANSFER_SECONDS, metrics.FIRST_STEP_SECONDS)
        for histogram, begin, stop in zip(parts, moments, moments[1:], strict=False):
            if begin is not None and stop is not None:
                histogram.observe(stop - begin)

    def _journal(self, request: DecodeRequest, end: Finish | ShoalError) -> None:
        worker_id, attempt_id = self._config.worker_id, request.spec.attempt_id
        trace_states("decode request", request.times, worker_id=worker_id, attempt_id=attempt_id)
        log_event(
            _log,
            logging.WARNING if request.state is RequestState.FAILED else logging.DEBUG,
            "reservation ended" if request.reservation is not None else "ended without a reservation",
            end=request.state,
            error=loggable(end) if isinstance(end, ShoalError) else None,
            completion_tokens=sum(len(child.answer_ids) for child in request.children),
            held_s=request.seconds(RequestState.RESERVED, request.state),
        )


_END_STATES: dict[type, RequestState] = {
    Finish: RequestState.FINISHED,
    Cancelled: RequestState.CANCELLED,
    Preempted: RequestState.CANCELLED,
}


def _words(end: Finish | ShoalError) -> str:
    return f"finished: {end.reason}" if isinstance(end, Finish) else str(end)
