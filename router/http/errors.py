"""Errors as OpenAI's clients expect them. Knows the one table from error class to HTTP status; knows no endpoint."""

import logging
import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shoal import errors
from shoal.rpc.guards import retry_after

_log = logging.getLogger(__name__)


class BodyTooLarge(errors.InvalidRequest):
    """The body exceeds the limit."""


class BodyTooSlow(errors.DeadlineExceeded):
    """The body did not arrive in time."""


class BadField(errors.InvalidRequest):
    """A field of the body is of the wrong type, unknown or out of range."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedField(errors.Unsupported):
    """A field asks for something that is not offered."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    kind: str  # OpenAI's `type`
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


_SEARCHED: Final = 1000  # characters of a message, which may quote what the client sent
_RETRY: Final = (("retry-after", "1"),)
ROWS: Final[Mapping[type[errors.ShoalError], _Row]] = {
    BodyTooLarge: _Row(413, "invalid_request_error", "request_too_large"),
    BodyTooSlow: _Row(408, "timeout_error", "request_timeout"),
    errors.InvalidRequest: _Row(400, "invalid_request_error"),
    errors.Unauthenticated: _Row(401, "authentication_error", "invalid_api_key", (("www-authenticate", "Bearer"),)),
    errors.NotFound: _Row(404, "invalid_request_error", "model_not_found"),
    errors.AlreadyExists: _Row(409, "invalid_request_error", "already_exists"),
    errors.CapacityExceeded: _Row(429, "rate_limit_error", "capacity_exceeded", _RETRY),
    errors.Cancelled: _Row(499, "cancelled", "cancelled"),
    errors.Mismatch: _Row(500, "server_error", "mismatch"),
    errors.InternalError: _Row(500, "server_error", "internal_error"),
    errors.Unsupported: _Row(501, "invalid_request_error", "unsupported"),
    errors.Unavailable: _Row(503, "server_error", "unavailable", _RETRY),
    errors.Preempted: _Row(503, "server_error", "unavailable", _RETRY),
    errors.DeadlineExceeded: _Row(504, "timeout_error", "deadline_exceeded"),
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What goes to the client."""

    status: int
    body: Mapping[str, Any]
    headers: tuple[tuple[str, str], ...] = ()


def answer_error(error: errors.ShoalError, fields: Collection[str] = ()) -> ErrorAnswer:
    """Status and body. `fields` are the names that may be blamed; the first that the message has is its `param`.

    A bug's own words stay in the log, under an incident id that the client gets.
    """
    row = next((ROWS[cls] for cls in type(error).__mro__ if cls in ROWS), ROWS[errors.InternalError])
    message = str(error)
    if row is ROWS[errors.InternalError]:
        message = incident("an HTTP request", error)
    param = error.param if isinstance(error, BadField | UnsupportedField) else None
    if param is None and row.status == 400:
        if "prompt" in fields:
            message = message.replace("input_ids", "prompt")  # which is what gRPC calls it
        param = next((word for word in re.findall(r"[\w']+", message[:_SEARCHED]) if word in fields), None)
    code = "context_length_exceeded" if row.status == 400 and "context limit" in message else row.code
    headers = retry_after(error) or row.headers
    return ErrorAnswer(row.status, error_body(message, row.kind, param, code), headers)


def as_shoal_error(error: Exception) -> errors.ShoalError:
    """The error itself, or an InternalError that it caused."""
    if isinstance(error, errors.ShoalError):
        return error
    internal = errors.InternalError("an error nobody foresaw")
    internal.__cause__ = error
    return internal


def error_body(message: str, kind: str, param: str | None, code: str | None) -> Mapping[str, Any]:
    """OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def incident(where: str, error: BaseException) -> str:
    """Log an error of ours with its traceback; returns the words for the client."""
    incident_id = uuid.uuid4().hex[:12]
    _log.error("unhandled error in %s, incident %s", where, incident_id, exc_info=error)
    return f"internal error; the server's log has the details under {incident_id}"
