"""The one table between Shoal's errors and gRPC statuses, both ways. Knows no service."""

from collections.abc import Mapping
from typing import Final

import grpc

from shoal import errors

STATUS_OF: Final[Mapping[type[errors.ShoalError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.CapacityExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Mismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}

_ERROR_OF: Final[Mapping[grpc.StatusCode, type[errors.ShoalError]]] = {
    **{status: error for error, status in STATUS_OF.items()},
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.PERMISSION_DENIED: errors.Unauthenticated,
    grpc.StatusCode.ABORTED: errors.Unavailable,
}

_GRPC_WORDS: Final = ("Stream removed", "Deadline Exceeded", "Socket closed", "Cancelled by")  # gRPC's own, not for users
_OWN_WORDS: Final[Mapping[grpc.StatusCode, str]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "the call's deadline passed before its work was done; allow more time",
    grpc.StatusCode.UNAVAILABLE: "the server closed the connection; retry when it is back",
    grpc.StatusCode.CANCELLED: "the call was cancelled",
}


def to_status(error: errors.ShoalError) -> grpc.StatusCode:
    """The status of an error, found along its base classes; INTERNAL for a bare ShoalError."""
    for cls in type(error).__mro__:
        if cls in STATUS_OF:
            return STATUS_OF[cls]
    return grpc.StatusCode.INTERNAL


def error_from_status(code: grpc.StatusCode, details: str) -> errors.ShoalError:
    """The error of a status; statuses that Shoal never sends become InternalError."""
    if not details or details.startswith(_GRPC_WORDS):
        details = _OWN_WORDS.get(code, f"the call ended with {code.name}")
    return _ERROR_OF.get(code, errors.InternalError)(details)


def error_from_rpc(error: grpc.RpcError) -> errors.ShoalError:
    """Map what a stub raised (grpc.aio.AioRpcError, or the synchronous stub's error) to Shoal's tree."""
    code = getattr(error, "code", None)
    details = getattr(error, "details", None)
    if code is None or details is None:
        return errors.InternalError("the call failed without a status")
    mapped = error_from_status(code(), details() or "")
    if isinstance(mapped, errors.CapacityExceeded):
        mapped.retry_after_s = _retry_after_s(error)
    return mapped


def _retry_after_s(error: grpc.RpcError) -> float | None:
    trailing = getattr(error, "trailing_metadata", None)
    for name, value in (trailing() if trailing is not None else None) or ():
        if name == "retry-after" and isinstance(value, str) and value.isascii() and value.isdigit():
            return float(value)
    return None
