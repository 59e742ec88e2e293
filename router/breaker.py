"""Whether a worker may be given requests, by how its last ones ended. Knows faults, successes and the time it is told; no worker.

    CLOSED ──num_faults in a row──▶ OPEN ──open_s later, a request comes──▶ HALF_OPEN ──it ends well──▶ CLOSED
                                     ▲                                         │
                                     └────a fault: open twice as long──────────┘

HALF_OPEN lets one request try; while it runs, no other. One that proves nothing (its client left) makes room for the next.
What is a fault is for the caller to say: a worker's own failure, never a refusal, a cancellation or a client's deadline.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class BreakerState(StrEnum):
    """See the picture above."""

    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """`open_s` doubles with each probe that fails, up to `max_open_s`."""

    num_faults: int = 5
    open_s: float = 1.0
    max_open_s: float = 30.0


USUAL: Final = BreakerOptions()


class Breaker:
    """One worker's. Times are of one steady clock."""

    def __init__(self, options: BreakerOptions = USUAL) -> None:
        self.state = BreakerState.CLOSED
        self._options = options
        self._num_faults = 0
        self._open_s = options.open_s
        self._opened_at = 0.0
        self._last_fault_at = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.OPEN and self.waits_s(now) == 0)

    def waits_s(self, now: float) -> float:
        """Seconds until a request may try again; 0 when nothing but a running probe keeps it from doing so."""
        return max(0.0, self._opened_at + self._open_s - now) if self.state is BreakerState.OPEN else 0.0

    def begin(self, now: float) -> None:
        """A request is sent."""
        if self.state is BreakerState.OPEN and self.waits_s(now) == 0:
            self.state = BreakerState.HALF_OPEN

    def succeed(self) -> None:
        """A request has ended well."""
        self.state, self._num_faults, self._open_s = BreakerState.CLOSED, 0, self._options.open_s

    def fail(self, now: float, begun_at: float | None = None) -> None:
        """A request has ended by a fault of the worker.

        Those that ran side by side count once: one torn pair ends many at a time and says little of the next.
        """
        if begun_at is not None and begun_at < self._last_fault_at:
            return
        self._last_fault_at = now
        self._num_faults += 1
        if self.state is BreakerState.HALF_OPEN:
            self._open_s = min(self._options.max_open_s, 2 * self._open_s)
            self._open(now)
        elif self.state is BreakerState.CLOSED and self._num_faults >= self._options.num_faults:
            self._open(now)

    def give_up(self) -> None:
        """The request that probed has ended and proves nothing: the next one may try at once."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN

    def _open(self, now: float) -> None:
        self.state, self._opened_at = BreakerState.OPEN, now
