"""Deadlines of calls. Knows that every call has an end, also when its caller named none."""

from typing import Any, Final

import grpc

from shoal.errors import DeadlineExceeded

MAX_REQUEST_S: Final = 3600.0  # the end of a call whose caller gave no deadline


def time_remaining_s(context: "grpc.aio.ServicerContext[Any, Any]", maximum_s: float = MAX_REQUEST_S) -> float:
    """Seconds this call may still take, to be passed on as the `timeout` of every call made for it.

    Raises DeadlineExceeded when none are left.
    """
    remaining = context.time_remaining()
    if remaining is None:
        return maximum_s
    if remaining <= 0:
        raise DeadlineExceeded("the request's deadline passed before its work was done; allow more time")
    return min(remaining, maximum_s)
