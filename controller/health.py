"""Notices a worker that lives but is of no use: silent, or NOT_SERVING for long. Knows the standard health service and no Ray."""

import asyncio
import logging
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.rpc import ClusterLink

_log = logging.getLogger(__name__)
_LOOKS: Final = 4  # within the patience


async def wait_until_ill(address: str, patience_s: float, link: ClusterLink | None = None) -> str:
    """Ask for health a few times within `patience_s`; return, in words, once SERVING has not been heard for so long.

    For workers that have been SERVING: a full one still is, and one that drains is no longer watched. Answers are counted and not
    seconds, so that a standstill of this process, which is no worker's silence, costs one answer at most.
    """
    loop = asyncio.get_running_loop()
    interval_s = patience_s / _LOOKS
    async with (link or ClusterLink()).open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        num_ill, heard = -1, "no answer to a health check"  # answers since the last SERVING; the first is asked for at once
        while num_ill < _LOOKS - 1:
            asked_at = loop.time()
            num_ill += 1
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=interval_s)
            except grpc.aio.AioRpcError as error:
                heard = "no answer to a health check"
                _log.info("%s from %s: %s", heard, address, error.code().name)
            else:
                heard = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    num_ill = 0
                else:
                    _log.info("%s says %s", address, heard)
            await asyncio.sleep(max(0.0, asked_at + interval_s - loop.time()))
    return f"{heard} for {patience_s:g} s"
