"""One try at a request: the decode leg, the prefill leg, and their common end. Knows the internal protos; never touches KV.

Decode ──▶ Reserved ──▶ tokens … ──▶ Finished
              └──▶ Prefill ──▶ response          the first error of either leg ends both
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from shoal.config.logs import log_event, loggable
from shoal.errors import Cancelled, DeadlineExceeded, InternalError, Preempted, ShoalError, Unavailable
from shoal.pb.internal.v1 import worker_pb2
from shoal.router.attempt_state import AttemptState, Progress
from shoal.router.instruments import PREFILLS
from shoal.router.legs import DispatchRequest, decode_message, prefill_message, read_end, read_tokens
from shoal.router.output import Output
from shoal.router.worker import Worker
from shoal.rpc import error_from_rpc
from shoal.rpc.tracing import trace_states

_log = logging.getLogger(__name__)
_PREFILL_REPORT_S: Final = 1.0  # decode has acknowledged before it samples, so the response is on its way


@dataclass(slots=True)
class AttemptReport:
    """What became known on the way."""

    decode_worker: str = ""
    prefill_worker: str = ""
    reserved: worker_pb2.Reserved | None = None
    progress: Progress = field(default_factory=Progress)
    prefill: worker_pb2.PrefillResponse | None = None
    finished: dict[int, worker_pb2.Finished] = field(default_factory=dict)  # by child
    failed: set[tuple[str, int]] = field(default_factory=set)  # workers that may be to blame

    @property
    def reserved_at(self) -> float | None:
        """Of the event loop's clock."""
        times = self.progress.times
        return times.get(AttemptState.PREFILLING, times.get(AttemptState.DECODING))


class Attempt:
    """Owns both calls; whoever leaves `tokens` early ends them."""

    def __init__(
        self,
        request: DispatchRequest,
        replays: Mapping[int, tuple[int, ...]],
        decode: Worker,
        prefill: Worker | None,
        cost: tuple[int, int],
        local_prefill: worker_pb2.LocalPrefill,
        caller: str,
    ) -> None:
        """`replays`: the children that still run, and what each has generated so far. `cost`: token-layers of prefill and decode.
        `local_prefill`: when decode prefills. `caller`: this router's own id."""
        self.report = AttemptReport(decode_worker=decode.worker_id)
        self._request = request
        self._local_prefill = local_prefill
        self._caller = caller
        self._replays = replays
        self._asides: set[asyncio.Task[None]] = set()
        self._decode = decode
        self._prefill = prefill
        self._call: Any = None
        self._prefill_task: asyncio.Task[None] | None = None
        self._failure: ShoalError | None = None
        self._decode_begun_at = self._prefill_begun_at = 0.0  # as the breakers' clock tells it
        self._at_fault: set[tuple[str, int]] = set()  # of `report.failed` those that failed, rather than refused
        self._decode_debt = _Debt(decode, cost[1])
        self._prefill_debt = _Debt(prefill, cost[0]) if prefill is not None else None
        self._local_debt = _Debt(decode, cost[0] if prefill is None else 0)

    @property
    def was_handed_over(self) -> bool:
        """Whether it failed because a worker drains: that costs none of the request's tries."""
        return any(worker.is_leaving for worker in (self._decode, self._prefill) if worker and worker.key in self.report.failed)

    @property
    def _is_over(self) -> bool:
        """Whether decode has said of every child how it ended."""
        return self._replays.keys() <= self.report.finished.keys()

    async def outputs(self) -> AsyncGenerator[list[Output], None]:
        """Tokens as decode sends them, and the end of each child; all have ended when this ends well.

        Raises the first error of either leg. A leg that was cancelled by its own worker counts as Unavailable.
        """
        self._decode.hold(self._decode_lost)
        self._decode_begun_at = self._decode.begin()
        if self._prefill is not None:
            self._prefill.hold(self._prefill_lost)
        try:
            if self._failure is not None:
                raise self._failure
            message = decode_message(self._request, self._replays, self._local_prefill, self._caller)
            self._call = self._decode.calls.decode(message, self._time_left())
            while (event := await self._read()) is not None:
                match event.WhichOneof("event"):
                    case "reserved":
                        self._take_reservation(event.reserved)
                    case "tokens":
                        self._is_decoding()
                        self._decode.prove()
                        self._decode_debt.pay(len(event.tokens.token_ids) * self._decode.fingerprint.num_layers)
                        yield read_tokens(self._request, event.tokens)
                    case "finished":
                        self._is_decoding()
                        self.report.finished[event.finished.index] = event.finished
                        await self.settle()
                        if self._is_over:
                            self.report.progress.end(AttemptState.FINISHED)
                        yield [read_end(event.finished)]
                        if self._is_over:
                            return
                    case "preempted":
                        raise Preempted(f"decode worker {self._decode.worker_id} needed the request's KV blocks for others")
                    case other:
                        raise InternalError(f"decode worker {self._decode.worker_id} sent an event of kind {other}")
            raise self._blame(self._decode, Unavailable(f"decode worker {self._decode.worker_id} ended its stream early"))
        except Exception:
            self.report.progress.end(AttemptState.FAILED)
            raise
        finally:
            self.report.progress.end(AttemptState.CANCELLED)
            self._judge()
            self._trace()
            await self._end()

    def _judge(self) -> None:
        """What the attempt says of its workers. A prefill worker that was never called is not judged."""
        well = AttemptState.DECODING in self.report.progress.times
        self._decode.judge(self._verdict(self._decode, well=well), self._decode_begun_at)
        if self._prefill is not None and self._prefill_task is not None:
            self._prefill.judge(self._verdict(self._prefill, well=self.report.prefill is not None), self._prefill_begun_at)

    def _verdict(self, worker: Worker, *, well: bool) -> bool | None:
        """A worker that was told to go hands over what it has: no fault."""
        if worker.key in self._at_fault:
            return None if worker.is_leaving else False
        return True if well else None

    def _trace(self) -> None:
        report = self.report
        trace_states(
            "attempt",
            report.progress.times,
            attempt_id=report.reserved.attempt_id if report.reserved is not None else "",
            decode_worker=report.decode_worker,
            prefill_worker=report.prefill_worker,
        )

    def _is_decoding(self) -> None:
        self._local_debt.clear()
        if self.report.progress.state is not AttemptState.DECODING:
            self.report.progress.move(AttemptState.DECODING)

    def end_children(self, indexes: Collection[int]) -> None:
        """Tell decode that these children need no more tokens; the others go on."""
        if self.report.reserved is not None and not self._is_over:
            aside = asyncio.create_task(self._end_children(self.report.reserved.attempt_id, indexes))
            self._asides.add(aside)
            aside.add_done_callback(self._asides.discard)

    async def _end_children(self, attempt_id: str, indexes: Collection[int]) -> None:
        request = worker_pb2.EndChildrenRequest(attempt_id=attempt_id, indexes=indexes)
        try:
            await self._decode.stub.EndChildren(request, timeout=self._time_left())
        except (grpc.aio.AioRpcError, DeadlineExceeded) as error:
            _log.warning("children could not be ended early: %s", error)

    async def settle(self) -> None:
        """Wait, not for long, for the prefill leg's own figures."""
        if self._prefill_task is not None and not self._prefill_task.done():
            await asyncio.wait({self._prefill_task}, timeout=_PREFILL_REPORT_S)

    async def _end(self) -> None:
        self._decode.release(self._decode_lost)
        self._decode_debt.clear()
        self._local_debt.clear()
        self._prefill_ended()
        if self._call is not None:
            self._call.cancel()
        tasks = self._asides | ({self._prefill_task} if self._prefill_task is not None else set())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _take_reservation(self, reserved: worker_pb2.Reserved) -> None:
        if self.report.reserved is not None:
            raise InternalError(f"decode worker {self._decode.worker_id} reserved twice")
        self.report.reserved = reserved
        if not self._request.is_shadow:
            PREFILLS.labels(reserved.prefill_at or "nowhere", reserved.prefill_reason).inc()
        log_event(
            _log, logging.DEBUG, "prefill placed", at=reserved.prefill_at, reason=reserved.prefill_reason,
            prefill_tokens=self._request.num_prefill_tokens, cached_tokens=reserved.cached_tokens,
        )  # fmt: skip
        if reserved.num_entries == 0:
            self._prefill_ended()
            self.report.progress.move(AttemptState.DECODING)
            return
        self.report.progress.move(AttemptState.PREFILLING)
        if self._prefill is None:
            raise InternalError("decode expects a transfer, but nothing was to be prefilled elsewhere")
        self.report.prefill_worker = self._prefill.worker_id
        self._prefill_begun_at = self._prefill.begin()
        self._prefill_task = asyncio.create_task(self._run_prefill(self._prefill, reserved))

    async def _run_prefill(self, worker: Worker, reserved: worker_pb2.Reserved) -> None:
        try:
            message = prefill_message(self._request, reserved, self._decode.address)
            self.report.prefill = await worker.calls.prefill(message, self._time_left())
        except grpc.aio.AioRpcError as error:
            self._fail(worker, _leg_error(worker, error))
        except asyncio.CancelledError:
            if _cancelling():
                raise
            self._fail(worker, Unavailable(f"prefill worker {worker.worker_id} gave the request up; retry it"))
        except ShoalError as error:
            self._fail(worker, error)
        except Exception:  # noqa: BLE001  # logged with its traceback, and the request fails
            _log.exception("calling prefill worker %s", worker.worker_id)
            self._fail(worker, InternalError("the prefill leg could not be run"))
        finally:
            self._prefill_ended()

    async def _read(self) -> worker_pb2.DecodeEvent | None:
        """The next event, None at the stream's end."""
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failure or self._blame(self._decode, _leg_error(self._decode, error)) from None
        except asyncio.CancelledError:
            if _cancelling():
                raise
            gave_up = Unavailable(f"decode worker {self._decode.worker_id} gave the request up; retry it")
            raise self._failure or self._blame(self._decode, gave_up) from None
        return None if event is grpc.aio.EOF else event  # type: ignore[attr-defined]  # missing in the stubs

    def _prefill_ended(self) -> None:
        if self._prefill is not None:
            self._prefill.release(self._prefill_lost)
        if self._prefill_debt is not None:
            self._prefill_debt.clear()

    def _prefill_lost(self, error: Unavailable) -> None:
        if self._prefill is not None:
            self._fail(self._prefill, error)

    def _decode_lost(self, error: Unavailable) -> None:
        self._fail(self._decode, error)

    def _fail(self, worker: Worker, error: ShoalError) -> None:
        """End both legs for the first error; later ones are its consequences. Once tokens come, decode needs prefill no more."""
        if self._is_over or (worker is self._prefill and self.report.progress.state is AttemptState.DECODING):
            _log.warning("%s worker failed after its part was done: %s", worker.pool, loggable(error))
        elif self._failure is None:
            self._failure = self._blame(worker, error)
            if self._call is not None:
                self._call.cancel()

    def _blame(self, worker: Worker, error: ShoalError) -> ShoalError:
        """A transfer has two ends, and the first to complain need not be the broken one."""
        self.report.failed.add(worker.key)
        if (
            worker is self._decode
            and self._prefill is not None
            and self._prefill_task is not None
            and not self._prefill_task.done()
        ):
            self.report.failed.add(self._prefill.key)
        if isinstance(error, Unavailable | InternalError):
            self._at_fault |= self.report.failed
        if worker is self._prefill and isinstance(error, Unavailable) and worker.state != "dead":
            self.report.failed.add(self._decode.key)  # it may be the link: not accused, but avoided if there is another
        return error

    def _time_left(self) -> float:
        left = self._request.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request's deadline passed before its work was done; allow more time")
        return left


class _Debt:
    """Token-layers that a worker owes this request; counted on the worker until paid or cleared."""

    def __init__(self, worker: Worker, token_layers: int) -> None:
        self._worker, self._left = worker, token_layers
        worker.own_token_layers += token_layers

    def pay(self, token_layers: int) -> None:
        paid = min(self._left, token_layers)
        self._left -= paid
        self._worker.own_token_layers -= paid

    def clear(self) -> None:
        self.pay(self._left)


def _leg_error(worker: Worker, error: grpc.aio.AioRpcError) -> ShoalError:
    """A leg's error in words for the client. What a worker cancelled is, for the client, a worker that failed."""
    mapped = error_from_rpc(error)
    if isinstance(mapped, Cancelled | Unavailable):
        return Unavailable(f"{worker.pool} worker {worker.worker_id} failed: {mapped}")
    return mapped


def _cancelling() -> bool:
    """Whether this task is being cancelled; grpc.aio raises CancelledError also for a call that its server cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
