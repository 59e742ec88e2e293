"""One request on a decode worker: what it asks for, where it stands, and when it got there. Knows no transport and no tensors.

    QUEUED ──blocks──▶ RESERVED ──first entry──▶ RECEIVING ──last entry──▶ READY ──first step──▶ RUNNING ──last token──▶ FINISHED
       │                  │  └───────────── nothing to transfer ────────────▲│                      │
       │                  │                          │                       │                      │
       └──────────────────┴──────────────────────────┴───────────────────────┴──────────────────────┴──▶ CANCELLED │ FAILED

CANCELLED: the caller left. FAILED: an error was sent to the caller. Whatever the end, blocks are given back by one path.
"""

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum

from shoal.decode_worker.output import Finish, OutputStream
from shoal.decode_worker.reservations import Reservation
from shoal.decode_worker.spec import DecodeSpec
from shoal.errors import InternalError, ShoalError


class RequestState(StrEnum):
    """Where a request stands; see the picture above."""

    QUEUED = "queued"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_end(self) -> bool:
        return self in _ENDS


_ENDS = frozenset({RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED})
_NEXT = {
    RequestState.QUEUED: {RequestState.RESERVED},
    RequestState.RESERVED: {RequestState.RECEIVING, RequestState.READY},
    RequestState.RECEIVING: {RequestState.READY},
    RequestState.READY: {RequestState.RUNNING},
    RequestState.RUNNING: {RequestState.FINISHED},
}


class DecodeRequest:
    """The living half of a request. Belongs to the event loop."""

    def __init__(self, spec: DecodeSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.token_ids = [*spec.prompt_ids, *spec.replay_ids]  # then the sampled ones
        self.num_sampled = 0
        self.output = OutputStream()
        self.reservation: Reservation | None = None
        self.received_bytes = 0  # payload, counted at the channel
        loop = asyncio.get_running_loop()
        self.reserved: asyncio.Future[Reservation | None] = loop.create_future()  # None: ended before it had one
        self.ended: asyncio.Future[Finish | ShoalError] = loop.create_future()
        self.state = RequestState.QUEUED
        self._clock = clock
        self.times: dict[RequestState, float] = {RequestState.QUEUED: clock()}
        self.first_token_at: float | None = None

    def move(self, state: RequestState) -> None:
        """Enter a state and note the time. Raises InternalError for a step the picture does not have."""
        if self.state.is_end or (state not in _NEXT.get(self.state, ()) and state not in (_ENDS - {RequestState.FINISHED})):
            raise InternalError(f"request {self.spec.attempt_id} cannot go from {self.state} to {state}")
        self.state = state
        self.times[state] = self._clock()

    def end(self, end: Finish | ShoalError) -> None:
        """It is over, for whatever reason. Only the first counts; the request's own task gives everything back."""
        if not self.ended.done():
            self.ended.set_result(end)

    def sampled(self, token_id: int) -> None:
        """Account one sampled token."""
        self.token_ids.append(token_id)
        self.num_sampled += 1
        if self.first_token_at is None:
            self.first_token_at = self._clock()

    @property
    def is_receiving(self) -> bool:
        """Whether a transfer of this request is still to come or under way."""
        return self.state in (RequestState.RESERVED, RequestState.RECEIVING)

    @property
    def num_outstanding_token_layers(self) -> int:
        """Decode tokens still to be run × layers, with every token it may yet sample (placement's measure of work)."""
        layout = self.spec.layout
        num_to_run = self.spec.sampling.max_tokens - self.num_sampled
        if self.num_sampled == 0:
            num_to_run += len(self.spec.replay_ids) + layout.split.num_prompt_tokens - layout.split.num_prefill_tokens - 1
        return max(0, num_to_run) * layout.num_layers

    def ms_since_reserved(self, moment: float | None) -> float:
        """Milliseconds from the reservation to a moment; 0 when either has not come."""
        reserved = self.times.get(RequestState.RESERVED)
        return 0.0 if moment is None or reserved is None else (moment - reserved) * 1e3
