"""Notices a worker that lives but is of no use: silent, or NOT_SERVING for long. Knows the standard health service and no Ray."""

import asyncio
import logging
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.rpc import ClusterLink

_log = logging.getLogger(__name__)


async def wait_until_ill(address: str, patience_s: float, link: ClusterLink | None = None) -> str:
    """Ask for health a few times within `patience_s`; return, in words, once SERVING has not been heard for so long.

    For workers that have been SERVING: a full one still is, and one that drains is no longer watched.
    """
    loop = asyncio.get_running_loop()
    interval_s = patience_s / 4
    async with (link or ClusterLink()).open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        well_at, heard = loop.time(), "no answer to a health check"
        while loop.time() - well_at < patience_s:
            asked_at = loop.time()
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=interval_s)
            except grpc.aio.AioRpcError as error:
                heard = "no answer to a health check"
                _log.info("%s from %s: %s", heard, address, error.code().name)
            else:
                heard = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    well_at = loop.time()
                else:
                    _log.info("%s says %s", address, heard)
            await asyncio.sleep(max(0.0, asked_at + interval_s - loop.time()))
    return f"{heard} for {patience_s:g} s"
