"""The controller's gRPC service: translate, nothing else."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from shoal.controller.endpoints import EndpointBoard
from shoal.pb.internal.v1 import controller_pb2, controller_pb2_grpc

_log = logging.getLogger(__name__)


class ControllerServicer(controller_pb2_grpc.ControllerServicer):
    """Publishes the board to any number of routers."""

    def __init__(self, board: EndpointBoard) -> None:
        self._board = board

    async def WatchEndpoints(
        self, request: controller_pb2.WatchEndpointsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[controller_pb2.Endpoints]:
        _log.info("router %s watches endpoints", request.router_id or context.peer())
        async for endpoints in self._board.watch():
            yield endpoints
