"""Where one attempt of a request stands, and how long it stood there. Knows states and their order; no leg and no message.

    RESERVING ──Reserved──▶ PREFILLING ──first tokens──▶ DECODING ──Finished of every child──▶ FINISHED
        │  └────Reserved, nothing to transfer─────────────▲ │
        └──────────────────────────┴────────────────────────┴──▶ FAILED │ CANCELLED

FAILED: the first error of either leg; the request may go on as another attempt. CANCELLED: nobody needs more (the caller left, an
abort, a stop string). docs/lifecycle.md draws it beside the workers' own states.
"""

import time
from collections.abc import Callable
from enum import StrEnum

from shoal.errors import InternalError
from shoal.router.instruments import ATTEMPT_STATE_SECONDS


class AttemptState(StrEnum):
    """See the picture above."""

    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = str.__hash__  # looked up several times for each request; Enum's own is written in Python

    @property
    def is_end(self) -> bool:
        return self not in NEXT


_EARLY = frozenset({AttemptState.FAILED, AttemptState.CANCELLED})
NEXT = {
    AttemptState.RESERVING: _EARLY | {AttemptState.PREFILLING, AttemptState.DECODING},
    AttemptState.PREFILLING: _EARLY | {AttemptState.DECODING},
    AttemptState.DECODING: _EARLY | {AttemptState.FINISHED},
}


class Progress:
    """One attempt's way through the states. `times` holds when each was entered, by the event loop's clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.state = AttemptState.RESERVING
        self.times = {AttemptState.RESERVING: clock()}

    def move(self, state: AttemptState) -> None:
        """Enter a state. Raises InternalError for a step the picture does not have."""
        if state not in NEXT.get(self.state, ()):
            raise InternalError(f"an attempt cannot go from {self.state} to {state}")
        now = self._clock()
        ATTEMPT_STATE_SECONDS.labels(self.state).observe(now - self.times[self.state])
        self.state, self.times[state] = state, now

    def end(self, state: AttemptState) -> None:
        """The same, unless it has ended already."""
        if not self.state.is_end:
            self.move(state)
