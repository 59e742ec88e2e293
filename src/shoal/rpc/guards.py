"""Guards handlers: what they raise becomes a gRPC status. Knows no service; lets no foreign text out to a caller."""

import inspect
import logging
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from shoal.errors import CapacityExceeded, InternalError, ShoalError
from shoal.rpc.parsing import read_message
from shoal.rpc.status import error_from_rpc, to_status

_Read: TypeAlias = Callable[[bytes], Any]
_log = logging.getLogger(__name__)


def guarded(handler: Any, method: str) -> Any:
    """The same handler, with what it raises turned into a status.

    A ShoalError (or the status of a call made downstream) travels with its message; anything else is INTERNAL with an id. The id
    is logged beside the traceback, so an operator finds what the caller must not see.
    """
    read = _reader(handler)
    changes = {} if read is None else {"request_deserializer": None}
    for kind in ("unary_unary", "stream_unary"):
        if (behaviour := getattr(handler, kind)) is not None and inspect.iscoroutinefunction(behaviour):
            return handler._replace(**changes, **{kind: _guard_unary(behaviour, method, read)})
    for kind in ("unary_stream", "stream_stream"):
        if (behaviour := getattr(handler, kind)) is not None:
            if inspect.iscoroutinefunction(behaviour):  # writes through context.write
                return handler._replace(**changes, **{kind: _guard_unary(behaviour, method, read)})
            if not inspect.isgeneratorfunction(behaviour):  # an async generator, or what returns one
                return handler._replace(**changes, **{kind: _guard_stream(behaviour, method, read)})
    return handler


def _reader(handler: Any) -> _Read | None:
    """How to read the one message of a call, so that what cannot be read is the caller's error; None for streams of requests."""
    message_class = getattr(handler.request_deserializer, "__self__", None)
    if handler.request_streaming or not (isinstance(message_class, type) and issubclass(message_class, Message)):
        return None
    return partial(read_message, message_class)


def _guard_unary(
    behaviour: Callable[[Any, Any], Awaitable[Any]], method: str, read: _Read | None
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request if read is None else read(request), context)
        except Exception as error:  # noqa: BLE001  # nothing is swallowed: every one ends the call
            await _abort(error, context, method)

    return answer


def _guard_stream(
    behaviour: Callable[[Any, Any], AsyncGenerator[Any, None]], method: str, read: _Read | None
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(request if read is None else read(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001  # nothing is swallowed: every one ends the call
            await _abort(error, context, method)

    return answer


async def _abort(error: Exception, context: Any, method: str) -> None:
    """End the call with the error's status; what is not ours becomes INTERNAL, logged with its traceback. Always raises."""
    match error:
        case grpc.aio.AbortError():  # the handler has set its own status
            raise error
        case ShoalError() if not isinstance(error, InternalError):
            await context.abort(to_status(error), str(error), retry_after(error))
        case grpc.aio.AioRpcError():
            await context.abort(to_status(mapped := error_from_rpc(error)), str(mapped))
        case _:
            incident_id = uuid.uuid4().hex[:12]
            _log.error("unhandled error in %s, incident %s", method, incident_id, exc_info=error)
            words = f"internal error; the server's log has the details under {incident_id}"
            await context.abort(grpc.StatusCode.INTERNAL, words)


def retry_after(error: ShoalError) -> tuple[tuple[str, str], ...]:
    """The header, in whole seconds, of an error that says when to try again."""
    after_s = error.retry_after_s if isinstance(error, CapacityExceeded) else None
    return () if after_s is None else (("retry-after", str(max(1, math.ceil(after_s)))),)
