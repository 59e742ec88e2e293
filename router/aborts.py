"""Aborts of requests that other routers sent. Knows decode workers, which know every router's requests; keeps no state."""

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import Final

import grpc

from shoal.pb.internal.v1 import worker_pb2
from shoal.router.worker import Worker
from shoal.rpc import error_from_rpc

_log = logging.getLogger(__name__)
_TIMEOUT_S: Final = 1.0


async def abort_elsewhere(workers: Iterable[Worker], request_ids: Collection[str], tenant: str, caller: str) -> int:
    """End a tenant's requests with these ids that run on these workers for other routers than `caller`; how many there were."""
    if not request_ids:
        return 0
    request = worker_pb2.AbortRequestsRequest(request_ids=request_ids, tenant=tenant, caller=caller)
    running = [worker for worker in workers if worker.state in ("ready", "draining")]
    return sum(await asyncio.gather(*(_abort(worker, request) for worker in running)))


async def _abort(worker: Worker, request: worker_pb2.AbortRequestsRequest) -> int:
    try:
        answer: worker_pb2.AbortRequestsResponse = await worker.stub.AbortRequests(request, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        _log.warning("decode worker %s cannot be asked to abort: %s", worker.worker_id, error_from_rpc(error))
        return 0
    return answer.num_aborted
