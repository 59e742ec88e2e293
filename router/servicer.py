"""The gRPC door: translate, call, translate. Knows deadlines and contexts of calls; everything else is service.py's."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc

from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.router.field_sizes import check_sizes
from shoal.router.service import RouterService
from shoal.rpc import time_remaining_s
from shoal.rpc.tracing import continue_trace

Context = grpc.aio.ServicerContext


class ShoalServicer(shoal_pb2_grpc.ShoalServicer):
    """One per router."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def Generate(
        self, request: shoal_pb2.GenerateRequest, context: "Context[Any, Any]"
    ) -> AsyncGenerator[shoal_pb2.GenerateResponse, None]:
        continue_trace(context.invocation_metadata())
        return self._service.generate(request, self._time_left_s(context))

    async def Score(self, request: shoal_pb2.ScoreRequest, context: "Context[Any, Any]") -> shoal_pb2.ScoreResponse:
        continue_trace(context.invocation_metadata())
        return await self._service.score(request, self._time_left_s(context))

    async def Tokenize(self, request: shoal_pb2.TokenizeRequest, context: "Context[Any, Any]") -> shoal_pb2.TokenizeResponse:
        return await self._service.tokenize(request)

    async def Detokenize(
        self, request: shoal_pb2.DetokenizeRequest, context: "Context[Any, Any]"
    ) -> shoal_pb2.DetokenizeResponse:
        return await self._service.detokenize(request)

    async def Abort(self, request: shoal_pb2.AbortRequest, context: "Context[Any, Any]") -> shoal_pb2.AbortResponse:
        check_sizes(request)
        return shoal_pb2.AbortResponse(num_aborted=await self._service.abort(request.request_ids))

    async def GetModelInfo(
        self, request: shoal_pb2.GetModelInfoRequest, context: "Context[Any, Any]"
    ) -> shoal_pb2.GetModelInfoResponse:
        return self._service.model_info()

    async def GetServerInfo(
        self, request: shoal_pb2.GetServerInfoRequest, context: "Context[Any, Any]"
    ) -> shoal_pb2.GetServerInfoResponse:
        return self._service.server_info()

    async def GetLoads(self, request: shoal_pb2.GetLoadsRequest, context: "Context[Any, Any]") -> shoal_pb2.GetLoadsResponse:
        return await self._service.loads()

    def _time_left_s(self, context: "Context[Any, Any]") -> float:
        return time_remaining_s(context, self._service.parts.config.max_request_s)
