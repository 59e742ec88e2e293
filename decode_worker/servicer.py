"""The DecodeWorker service: translate → call → translate. Knows protos; decides nothing."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from shoal.config.logs import bind_log_ids
from shoal.decode_worker.output import Finish, Output, OutputToken, PromptLogprobs
from shoal.decode_worker.request import DecodeRequest, RequestState
from shoal.decode_worker.reservations import Reservation
from shoal.errors import Cancelled, Preempted
from shoal.pb.internal.v1 import worker_pb2, worker_pb2_grpc
from shoal.pb.v1 import shoal_pb2
from shoal.placement.arithmetic import decode_kv_layer_tokens, kv_bytes
from shoal.rpc import time_remaining_s
from shoal.rpc.tracing import continue_trace
from shoal.types import TokenLogprobs

if TYPE_CHECKING:
    from shoal.decode_worker.worker import DecodeWorker

    Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(worker_pb2_grpc.DecodeWorkerServicer):
    """One per worker."""

    def __init__(self, worker: "DecodeWorker") -> None:
        self._worker = worker

    async def Decode(self, request: worker_pb2.DecodeRequest, context: "Context") -> AsyncIterator[worker_pb2.DecodeEvent]:
        """`reserved`, tokens, `finished` for each child. The stream's end, however it comes, ends the request."""
        continue_trace(context.invocation_metadata())
        bind_log_ids(request_id=request.request_id)  # of this call, and of the tasks it starts
        running = self._worker.submit(request, time_remaining_s(context, self._worker.config.max_request_s))
        try:
            reservation = await asyncio.shield(running.reserved)
            if reservation is not None:
                yield worker_pb2.DecodeEvent(reserved=self._reserved(running, reservation))
            try:
                async for outputs in running.output.batches():
                    for event in self._events(running, outputs):
                        yield event
            except Preempted:
                yield worker_pb2.DecodeEvent(preempted=worker_pb2.Preempted())
            if running.output.finish is not None:
                yield worker_pb2.DecodeEvent(finished=self._finished(running, running.output.finish))
        finally:
            running.end(Cancelled("the caller has left"))

    async def EndChildren(self, request: worker_pb2.EndChildrenRequest, context: "Context") -> worker_pb2.EndChildrenResponse:
        self._worker.end_children(request.attempt_id, request.indexes)
        return worker_pb2.EndChildrenResponse()

    async def AbortRequests(
        self, request: worker_pb2.AbortRequestsRequest, context: "Context"
    ) -> worker_pb2.AbortRequestsResponse:
        num_aborted = self._worker.abort(request.request_ids, request.tenant, request.caller)
        return worker_pb2.AbortRequestsResponse(num_aborted=num_aborted)

    async def Describe(self, request: worker_pb2.DescribeRequest, context: "Context") -> worker_pb2.WorkerDescription:
        return self._worker.describe()

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: "Context") -> shoal_pb2.WorkerLoad:
        return self._worker.load()

    async def GetWork(self, request: worker_pb2.GetWorkRequest, context: "Context") -> worker_pb2.WorkReport:
        return self._worker.work()

    def _reserved(self, running: DecodeRequest, reservation: Reservation) -> worker_pb2.Reserved:
        config = self._worker.config
        return worker_pb2.Reserved(
            attempt_id=running.spec.attempt_id,
            cached_tokens=reservation.num_cached_tokens,
            visibility=str(running.spec.layout.visibility),
            plan_digest=reservation.plan.digest,
            plan_bytes=reservation.plan.num_bytes,
            num_entries=len(reservation.plan.entries),
            lease_s=config.transfer.lease_s,
            transfer_address=self._worker.address,
            worker_id=config.worker_id,
            epoch=config.epoch,
            prefill_at=reservation.prefill.site,
            prefill_reason=reservation.prefill.reason,
        )

    def _events(self, running: DecodeRequest, outputs: Sequence[Output]) -> Iterator[worker_pb2.DecodeEvent]:
        """One message for each child's tokens, in order, and one for each child's end."""
        tokens: dict[int, list[OutputToken]] = {}
        for output in outputs:
            match output:
                case OutputToken():
                    tokens.setdefault(output.index, []).append(output)
                case PromptLogprobs():
                    yield worker_pb2.DecodeEvent(tokens=_prompt_logprobs(output.logprobs))
                case Finish():
                    if output.index in tokens:
                        yield worker_pb2.DecodeEvent(tokens=_tokens(tokens.pop(output.index)))
                    yield worker_pb2.DecodeEvent(finished=self._finished(running, output))
        for own in tokens.values():
            yield worker_pb2.DecodeEvent(tokens=_tokens(own))

    def _finished(self, running: DecodeRequest, finish: Finish) -> worker_pb2.Finished:
        spec, shape = running.spec, self._worker.shape
        child = next(child for child in running.children if child.index == finish.index)
        num_generated = len(spec.continuation_ids) or len(child.answer_ids)
        layer_tokens = decode_kv_layer_tokens(shape, spec.layout.visibility, spec.num_prompt_tokens, num_generated)
        return worker_pb2.Finished(
            finish_reason=str(finish.reason),
            matched_token_id=finish.matched_token_id,
            received_payload_bytes=running.received_bytes,
            kv_layer_tokens=layer_tokens,
            kv_bytes=kv_bytes(shape, self._worker.config.dtype, layer_tokens),
            transfer_done_ms=running.ms_since_reserved(running.times.get(RequestState.READY)),
            first_token_ms=running.ms_since_reserved(running.first_token_at),
            prefill_ms=running.ms_since_reserved(running.times.get(RequestState.RUNNING)) if running.prefills else 0.0,
            index=finish.index,
        )


def _tokens(tokens: Sequence[OutputToken]) -> worker_pb2.SampledTokens:
    message = worker_pb2.SampledTokens(token_ids=[token.token_id for token in tokens], index=tokens[0].index)
    for token in tokens:
        if token.logprobs is not None:
            message.logprobs.append(token.logprobs.logprob)
            _add_top(message.top_logprobs.add(), token.logprobs)
    return message


def _prompt_logprobs(logprobs: Sequence[TokenLogprobs]) -> worker_pb2.SampledTokens:
    message = worker_pb2.SampledTokens(prompt_logprobs=[token.logprob for token in logprobs])
    for token in logprobs:
        _add_top(message.prompt_top_logprobs.add(), token)
    return message


def _add_top(message: shoal_pb2.TopLogProbs, logprobs: TokenLogprobs) -> None:
    message.token_ids.extend(token_id for token_id, _ in logprobs.top)
    message.values.extend(value for _, value in logprobs.top)
