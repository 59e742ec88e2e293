"""The PrefillWorker service: translate → call → translate. Knows protos; decides nothing."""

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from shoal.config.logs import bind_log_ids
from shoal.errors import Cancelled, ShoalError
from shoal.pb.internal.v1 import worker_pb2, worker_pb2_grpc
from shoal.pb.v1 import shoal_pb2
from shoal.prefill_worker.task import TaskState
from shoal.rpc import time_remaining_s
from shoal.rpc.tracing import continue_trace

if TYPE_CHECKING:
    from shoal.prefill_worker.worker import PrefillWorker

    Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(worker_pb2_grpc.PrefillWorkerServicer):
    """One per worker."""

    def __init__(self, worker: "PrefillWorker") -> None:
        self._worker = worker

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: "Context") -> worker_pb2.PrefillResponse:
        """Returns when decode has acknowledged everything. The call's end, however it comes, ends the task."""
        continue_trace(context.invocation_metadata())
        bind_log_ids(request_id=request.request_id, attempt_id=request.attempt_id)
        task = self._worker.submit(request, time_remaining_s(context, self._worker.config.max_request_s))
        try:
            end = await asyncio.shield(task.answer)
        finally:
            task.end(Cancelled("the caller has left"))
        if isinstance(end, ShoalError):
            raise end
        return worker_pb2.PrefillResponse(
            sent_payload_bytes=end.payload_bytes,
            cached_tokens=task.num_cached,
            queue_ms=task.seconds(TaskState.QUEUED, TaskState.COMPUTING) * 1e3,
            compute_ms=task.seconds(TaskState.COMPUTING, TaskState.COMPUTED) * 1e3,
            after_compute_ms=task.seconds(TaskState.COMPUTED, TaskState.SENT) * 1e3,
        )

    async def Describe(self, request: worker_pb2.DescribeRequest, context: "Context") -> worker_pb2.WorkerDescription:
        return self._worker.describe()

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: "Context") -> shoal_pb2.WorkerLoad:
        return self._worker.load()

    async def GetWork(self, request: worker_pb2.GetWorkRequest, context: "Context") -> worker_pb2.WorkReport:
        return self._worker.work()
