"""Turns what a handler raises into a gRPC status. Knows no service; lets no foreign text out to a caller."""

import inspect
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shoal.errors import InternalError, InvalidRequest, ShoalError
from shoal.rpc.status import error_from_rpc, to_status

_log = logging.getLogger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """A ShoalError (or the status of a call made downstream) travels with its message; anything else is INTERNAL with an id.

    The id is logged beside the traceback, so an operator finds what the caller must not see.
    """

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        given = handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if not handler.request_streaming and handler.request_deserializer is not None:
            handler = handler._replace(request_deserializer=_readable_or_none(handler.request_deserializer))
        for kind in ("unary_unary", "stream_unary"):
            if (behaviour := getattr(handler, kind)) is not None and inspect.iscoroutinefunction(behaviour):
                return handler._replace(**{kind: _guard_unary(behaviour, method)})
        for kind in ("unary_stream", "stream_stream"):
            if (behaviour := getattr(handler, kind)) is not None:
                if inspect.isasyncgenfunction(behaviour):
                    return handler._replace(**{kind: _guard_stream(behaviour, method)})
                if inspect.iscoroutinefunction(behaviour):  # writes through context.write
                    return handler._replace(**{kind: _guard_unary(behaviour, method)})
        return given


def _readable_or_none(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """What cannot be read becomes None, for the guard to refuse: gRPC itself would answer UNKNOWN and log a traceback."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return None

    return read


def _guard_unary(behaviour: Callable[[Any, Any], Awaitable[Any]], method: str) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        async with _translated(context, method):
            return await behaviour(_checked(request), context)

    return guarded


def _guard_stream(
    behaviour: Callable[[Any, Any], AsyncGenerator[Any, None]], method: str
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        async with _translated(context, method), aclosing(behaviour(_checked(request), context)) as responses:
            async for response in responses:
                yield response

    return guarded


def _checked(request: Any) -> Any:
    if request is None:
        raise InvalidRequest("the request cannot be read: its bytes are not the message that this method takes")
    return request


@asynccontextmanager
async def _translated(context: Any, method: str) -> AsyncIterator[None]:
    try:
        yield
    except (grpc.aio.AbortError, GeneratorExit):  # the handler has set its own status; the stream is being closed
        raise
    except InternalError:
        await _abort_internal(context, method)
    except ShoalError as error:
        await context.abort(to_status(error), str(error))
    except grpc.aio.AioRpcError as error:
        await context.abort(to_status(mapped := error_from_rpc(error)), str(mapped))
    except Exception:  # noqa: BLE001  # nothing is swallowed: logged with its traceback, and the call fails
        await _abort_internal(context, method)


async def _abort_internal(context: Any, method: str) -> None:
    incident_id = uuid.uuid4().hex[:12]
    _log.exception("unhandled error in %s, incident %s", method, incident_id)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error; the server's log has the details under {incident_id}")
