"""One request as the simulator sees it, and what holds of every stream of them. Knows counts and times; knows no format."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shoal.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class SimRequest:
    """Arrival in seconds from the start, prompt and output in tokens.

    `prefix_hashes` name the prompt's leading blocks of `hash_tokens` tokens, for prefix caching; () = nothing is shared.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_hashes: tuple[int, ...] = ()
    hash_tokens: int = 512

    def __post_init__(self) -> None:
        if not self.arrival_s >= 0 or self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise InvalidConfig(
                f"a request needs an arrival of 0 s or later and at least one prompt and one output token, not "
                f"{self.arrival_s}, {self.num_prompt_tokens}, {self.num_output_tokens}"
            )


def in_order(requests: Iterable[SimRequest]) -> Iterator[SimRequest]:
    """Pass requests on and hold them to the order of arrival. Raises InvalidConfig at the first that is out of it."""
    latest = 0.0
    for index, request in enumerate(requests):
        if request.arrival_s < latest:
            raise InvalidConfig(
                f"request {index + 1} arrives at {request.arrival_s} s, before the one ahead of it; sort the trace"
            )
        latest = request.arrival_s
        yield request


def scaled(requests: Iterable[SimRequest], speed_up: float) -> Iterator[SimRequest]:
    """The same requests `speed_up` times as fast. Raises InvalidConfig unless it is more than zero."""
    if not speed_up > 0:
        raise InvalidConfig(f"a load factor of {speed_up} makes no sense; it must be more than zero")
    return (replace(request, arrival_s=request.arrival_s / speed_up) for request in requests)


def limited(requests: Iterable[SimRequest], *, num_requests: int | None, duration_s: float | None) -> Iterator[SimRequest]:
    """At most so many requests, of at most so many seconds."""
    for index, request in enumerate(requests):
        if (num_requests is not None and index >= num_requests) or (duration_s is not None and request.arrival_s >= duration_s):
            return
        yield request
