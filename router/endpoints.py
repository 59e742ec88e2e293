"""Where the workers are: lists from the controller's stream, or from a fixed set of addresses. Knows no request."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from typing import Final, Protocol

import grpc

from shoal.errors import InvalidConfig
from shoal.pb.internal.v1 import controller_pb2, controller_pb2_grpc, worker_pb2, worker_pb2_grpc
from shoal.router.instruments import WATCH_RECONNECTS
from shoal.router.worker import DECODE, PREFILL
from shoal.rpc import Address, ClusterLink, error_from_rpc

_log = logging.getLogger(__name__)
_FIRST_DELAY_S: Final = 0.1
_LAST_DELAY_S: Final = 5.0
_STATIC_INTERVAL_S: Final = 1.0


class EndpointSource(Protocol):
    """An endless stream of whole lists, the newest last."""

    def lists(self) -> AsyncIterator[controller_pb2.Endpoints]: ...


class ControllerEndpoints:
    """Follows one controller. While it is away nothing is yielded, so the last list stays in force."""

    def __init__(self, address: str, router_id: str, rng: random.Random | None = None, link: ClusterLink | None = None) -> None:
        self._address = str(Address.parse(address, "the controller's address"))
        self._router_id = router_id
        self._rng = rng or random.Random()
        self._link = link or ClusterLink()

    async def lists(self) -> AsyncIterator[controller_pb2.Endpoints]:
        delay_s = _FIRST_DELAY_S
        async with self._link.open_channel(self._address) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            while True:
                reason = "it ended the stream"
                try:
                    async for endpoints in stub.WatchEndpoints(controller_pb2.WatchEndpointsRequest(router_id=self._router_id)):
                        delay_s = _FIRST_DELAY_S
                        yield endpoints
                except grpc.aio.AioRpcError as error:
                    reason = str(error_from_rpc(error))
                WATCH_RECONNECTS.inc()
                _log.warning("controller %s is away (%s); keeping the last list, trying again", self._address, reason)
                await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.0))
                delay_s = min(_LAST_DELAY_S, 2 * delay_s)


class StaticEndpoints:
    """A fixed list of `pool=host:port`, each described by the worker itself; a worker that does not answer is not listed."""

    def __init__(self, workers: Sequence[str], interval_s: float = _STATIC_INTERVAL_S, link: ClusterLink | None = None) -> None:
        """Raises InvalidConfig that shows the form."""
        self._link = link or ClusterLink()
        self._interval_s = interval_s
        self._workers: list[tuple[str, str]] = []
        for text in workers:
            pool, equals, address = text.partition("=")
            if not equals or pool not in (PREFILL, DECODE):
                raise InvalidConfig(f"worker {text!r} must be prefill=host:port or decode=host:port")
            self._workers.append((pool, str(Address.parse(address, "worker"))))

    async def lists(self) -> AsyncIterator[controller_pb2.Endpoints]:
        channels = {address: self._link.open_channel(address) for _, address in self._workers}
        last: list[controller_pb2.Endpoint] | None = None
        version = 0
        try:
            while True:
                found = await asyncio.gather(
                    *(self._describe(pool, address, channels[address]) for pool, address in self._workers)
                )
                endpoints = [controller_pb2.Endpoint(worker=worker, state="ready") for worker in found if worker is not None]
                if endpoints != last:
                    last, version = endpoints, version + 1
                    yield controller_pb2.Endpoints(version=version, endpoints=endpoints)
                await asyncio.sleep(self._interval_s)
        finally:
            await asyncio.gather(*(channel.close(None) for channel in channels.values()))

    async def _describe(self, pool: str, address: str, channel: grpc.aio.Channel) -> worker_pb2.WorkerDescription | None:
        stub = (worker_pb2_grpc.DecodeWorkerStub if pool == DECODE else worker_pb2_grpc.PrefillWorkerStub)(channel)
        try:
            description: worker_pb2.WorkerDescription = await stub.Describe(worker_pb2.DescribeRequest(), timeout=2.0)
        except grpc.aio.AioRpcError as error:
            _log.debug("%s worker at %s does not answer: %s", pool, address, error_from_rpc(error))
            return None
        return description
