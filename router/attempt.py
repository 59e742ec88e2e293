"""One try at a request: the decode leg, the prefill leg, and their common end. Knows the internal protos; never touches KV.

Decode ──▶ Reserved ──▶ tokens … ──▶ Finished
              └──▶ Prefill ──▶ response          the first error of either leg ends both
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from shoal.errors import Cancelled, DeadlineExceeded, InternalError, ShoalError, Unavailable
from shoal.pb.internal.v1 import worker_pb2
from shoal.placement.cost import RequestCost
from shoal.router.output import OutputToken
from shoal.router.worker import Worker
from shoal.rpc import error_from_rpc
from shoal.types import SamplingParams
from shoal.visibility import Visibility

_log = logging.getLogger(__name__)
_PREFILL_REPORT_S: Final = 1.0  # decode has acknowledged before it samples, so the response is on its way


@dataclass(frozen=True, slots=True)
class DispatchRequest:
    """What both legs are told. `visibility` is resolved; `sampling.stop_token_ids` include EOS unless it is ignored."""

    request_id: str
    prompt_ids: tuple[int, ...]
    visibility: Visibility
    sampling: SamplingParams
    deadline: float  # of the event loop's clock

    @property
    def num_prefill_tokens(self) -> int:
        return self.visibility.split(len(self.prompt_ids)).num_prefill_tokens


@dataclass(slots=True)
class AttemptReport:
    """What became known on the way."""

    decode_worker: str = ""
    prefill_worker: str = ""
    reserved: worker_pb2.Reserved | None = None
    reserved_at: float | None = None  # of the event loop's clock
    prefill: worker_pb2.PrefillResponse | None = None
    finished: worker_pb2.Finished | None = None
    failed: set[tuple[str, int]] = field(default_factory=set)  # workers that may be to blame


class Attempt:
    """Owns both calls; whoever leaves `tokens` early ends them."""

    def __init__(
        self,
        request: DispatchRequest,
        replay_ids: tuple[int, ...],
        decode: Worker,
        prefill: Worker | None,
        cost: RequestCost,
    ) -> None:
        self.report = AttemptReport(decode_worker=decode.worker_id)
        self._request = request
        self._replay_ids = replay_ids
        self._decode = decode
        self._prefill = prefill
        self._call: Any = None
        self._prefill_task: asyncio.Task[None] | None = None
        self._failure: ShoalError | None = None
        self._decode_debt = _Debt(decode, cost.decode.token_layers)
        self._prefill_debt = _Debt(prefill, cost.prefill.token_layers) if prefill is not None else None

    async def tokens(self) -> AsyncGenerator[list[OutputToken], None]:
        """Sampled tokens as decode sends them; `report.finished` is set when they end well.

        Raises the first error of either leg. A leg that was cancelled by its own worker counts as Unavailable.
        """
        self._decode.hold(self._decode_lost)
        if self._prefill is not None:
            self._prefill.hold(self._prefill_lost)
        try:
            if self._failure is not None:
                raise self._failure
            self._call = self._decode.stub.Decode(self._decode_request(), timeout=self._time_left())
            while (event := await self._read()) is not None:
                match event.WhichOneof("event"):
                    case "reserved":
                        self._take_reservation(event.reserved)
                    case "tokens":
                        self._decode_debt.pay(len(event.tokens.token_ids) * self._decode.fingerprint.num_layers)
                        yield _output_tokens(event.tokens)
                    case "finished":
                        self.report.finished = event.finished
                        break
                    case other:
                        raise InternalError(f"decode worker {self._decode.worker_id} sent an event of kind {other}")
            if self.report.finished is None:
                raise self._blame(self._decode, Unavailable(f"decode worker {self._decode.worker_id} ended its stream early"))
            await self.settle()
        finally:
            await self._end()

    async def settle(self) -> None:
        """Wait, not for long, for the prefill leg's own figures."""
        if self._prefill_task is not None:
            await asyncio.wait({self._prefill_task}, timeout=_PREFILL_REPORT_S)

    async def _end(self) -> None:
        self._decode.release(self._decode_lost)
        self._decode_debt.clear()
        self._prefill_ended()
        if self._call is not None:
            self._call.cancel()
        if self._prefill_task is not None:
            self._prefill_task.cancel()
            await asyncio.wait({self._prefill_task})

    def _take_reservation(self, reserved: worker_pb2.Reserved) -> None:
        if self.report.reserved is not None:
            raise InternalError(f"decode worker {self._decode.worker_id} reserved twice")
        self.report.reserved = reserved
        self.report.reserved_at = time.monotonic()
        if reserved.num_entries == 0:
            return
        if self._prefill is None:
            raise InternalError("decode expects a transfer, but the prompt has no prefill tokens")
        self.report.prefill_worker = self._prefill.worker_id
        self._prefill_task = asyncio.create_task(self._run_prefill(self._prefill, reserved))

    async def _run_prefill(self, worker: Worker, reserved: worker_pb2.Reserved) -> None:
        try:
            self.report.prefill = await worker.stub.Prefill(self._prefill_request(reserved), timeout=self._time_left())
        except grpc.aio.AioRpcError as error:
            self._fail(worker, _leg_error(worker, error))
        except asyncio.CancelledError:
            if _cancelling():
                raise
            self._fail(worker, Unavailable(f"prefill worker {worker.worker_id} gave the request up; retry it"))
        except ShoalError as error:
            self._fail(worker, error)
        except Exception:  # noqa: BLE001  # logged with its traceback, and the request fails
            _log.exception("request %r: calling prefill worker %s", self._request.request_id, worker.worker_id)
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
        """End both legs for the first error; later ones are its consequences."""
        if self.report.finished is not None:
            _log.warning(
                "request %r: %s worker failed after the answer was complete: %s", self._request.request_id, worker.pool, error
            )
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
        return error

    def _time_left(self) -> float:
        left = self._request.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request's deadline passed before its work was done; allow more time")
        return left

    def _decode_request(self) -> worker_pb2.DecodeRequest:
        sampling = self._request.sampling
        return worker_pb2.DecodeRequest(
            request_id=self._request.request_id,
            prompt_ids=self._request.prompt_ids,
            replay_token_ids=self._replay_ids,
            visibility=str(self._request.visibility),
            sampling=worker_pb2.Sampling(
                max_tokens=sampling.max_tokens - len(self._replay_ids),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                stop_token_ids=sampling.stop_token_ids,
                num_logprobs=sampling.num_logprobs,
            ),
        )

    def _prefill_request(self, reserved: worker_pb2.Reserved) -> worker_pb2.PrefillRequest:
        return worker_pb2.PrefillRequest(
            request_id=self._request.request_id,
            attempt_id=reserved.attempt_id,
            prompt_ids=self._request.prompt_ids[: self._request.num_prefill_tokens],
            num_prompt_tokens=len(self._request.prompt_ids),
            visibility=str(self._request.visibility),
            cached_tokens=reserved.cached_tokens,
            plan_digest=reserved.plan_digest,
            decode_address=reserved.transfer_address or self._decode.address,
            decode_worker_id=reserved.worker_id,
            decode_epoch=reserved.epoch,
        )


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


def _output_tokens(message: worker_pb2.SampledTokens) -> list[OutputToken]:
    if not message.logprobs:
        return [OutputToken(token_id) for token_id in message.token_ids]
    tops: list[tuple[tuple[int, float], ...]] = [
        tuple(zip(top.token_ids, top.values, strict=True)) for top in message.top_logprobs
    ] or [()] * len(message.token_ids)
    return [
        OutputToken(token_id, logprob, top)
        for token_id, logprob, top in zip(message.token_ids, message.logprobs, tops, strict=True)
    ]


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
