"""Notices a worker that lives but does not answer. Knows the standard health service and nothing of Ray."""

import asyncio
import logging
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.rpc import open_channel

_log = logging.getLogger(__name__)

_SILENT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


async def wait_until_silent(address: str, silent_s: float) -> str:
    """Ask for health a few times within `silent_s`; return, in words, once nothing at all was answered for so long.

    Any answer counts, NOT_SERVING too: a full or draining worker is not a hung one.
    """
    loop = asyncio.get_running_loop()
    interval_s = silent_s / 4
    async with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answered_at = loop.time()
        while loop.time() - answered_at < silent_s:
            asked_at = loop.time()
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=interval_s)
                answered_at = loop.time()
            except grpc.aio.AioRpcError as error:
                if error.code() not in _SILENT:
                    answered_at = loop.time()
                else:
                    _log.info("no health answer from %s: %s", address, error.code().name)
            await asyncio.sleep(max(0.0, asked_at + interval_s - loop.time()))
    return f"no answer to a health check for {silent_s:g} s"
