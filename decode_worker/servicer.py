"""The DecodeWorker service: translate → call → translate. Knows protos; decides nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from shoal.decode_worker.output import OutputToken
from shoal.decode_worker.request import DecodeRequest, RequestState
from shoal.decode_worker.reservations import Reservation
from shoal.errors import Cancelled
from shoal.pb.internal.v1 import worker_pb2, worker_pb2_grpc
from shoal.pb.v1 import shoal_pb2
from shoal.placement.arithmetic import decode_kv_layer_tokens, kv_bytes
from shoal.rpc import time_remaining_s

if TYPE_CHECKING:
    from shoal.decode_worker.worker import DecodeWorker

    Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(worker_pb2_grpc.DecodeWorkerServicer):
    """One per worker."""

    def __init__(self, worker: "DecodeWorker") -> None:
        self._worker = worker

    async def Decode(self, request: worker_pb2.DecodeRequest, context: "Context") -> AsyncIterator[worker_pb2.DecodeEvent]:
        """`reserved`, tokens, `finished`. The stream's end, however it comes, ends the request."""
        running = self._worker.submit(request, time_remaining_s(context, self._worker.config.max_request_s))
        try:
            reservation = await asyncio.shield(running.reserved)
            if reservation is not None:
                yield worker_pb2.DecodeEvent(reserved=self._reserved(running, reservation))
            async for tokens in running.output.batches():
                yield worker_pb2.DecodeEvent(tokens=_tokens(tokens))
            yield worker_pb2.DecodeEvent(finished=self._finished(running))
        finally:
            running.end(Cancelled("the caller has left"))

    async def Describe(self, request: worker_pb2.DescribeRequest, context: "Context") -> worker_pb2.WorkerDescription:
        return self._worker.describe()

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: "Context") -> shoal_pb2.WorkerLoad:
        return self._worker.load()

    def _reserved(self, running: DecodeRequest, reservation: Reservation) -> worker_pb2.Reserved:
        config = self._worker.config
        return worker_pb2.Reserved(
            attempt_id=running.spec.attempt_id,
            cached_tokens=0,
            visibility=str(running.spec.layout.visibility),
            plan_digest=reservation.plan.digest,
            plan_bytes=reservation.plan.num_bytes,
            num_entries=len(reservation.plan.entries),
            lease_s=config.transfer.lease_s,
            transfer_address=self._worker.address,
            worker_id=config.worker_id,
            epoch=config.epoch,
        )

    def _finished(self, running: DecodeRequest) -> worker_pb2.Finished:
        finish, spec, shape = running.output.finish, running.spec, self._worker.shape
        num_generated = len(spec.replay_ids) + running.num_sampled
        layer_tokens = decode_kv_layer_tokens(shape, spec.layout.visibility, spec.num_prompt_tokens, num_generated)
        return worker_pb2.Finished(
            finish_reason=str(finish.reason) if finish else "",
            matched_token_id=finish.matched_token_id if finish else None,
            received_payload_bytes=running.received_bytes,
            kv_layer_tokens=layer_tokens,
            kv_bytes=kv_bytes(shape, self._worker.config.dtype, layer_tokens),
            transfer_done_ms=running.ms_since_reserved(running.times.get(RequestState.READY)),
            first_token_ms=running.ms_since_reserved(running.first_token_at),
        )


def _tokens(tokens: list[OutputToken]) -> worker_pb2.SampledTokens:
    message = worker_pb2.SampledTokens(token_ids=[token.token_id for token in tokens])
    for token in tokens:
        if token.logprobs is not None:
            message.logprobs.append(token.logprobs.logprob)
            message.top_logprobs.add(
                token_ids=[token_id for token_id, _ in token.logprobs.top], values=[value for _, value in token.logprobs.top]
            )
    return message
