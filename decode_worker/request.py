"""One request on a decode worker: what it asks for, where it stands, and when it got there. Knows no transport and no tensors.

    QUEUED ──blocks──▶ RESERVED ──first entry──▶ RECEIVING ──last entry──▶ READY ──first step──▶ RUNNING ──last token──▶ FINISHED
       │                  │  └───────────── nothing to transfer ────────────▲│ └─▶ PREFILLING ────▲ │
       │                  │                          │                       │                      │
       └──────────────────┴──────────────────────────┴───────────────────────┴──────────────────────┴──▶ CANCELLED │ FAILED

PREFILLING: prefill tokens run here, but for those of the step that samples the first token. CANCELLED: the caller left. FAILED:
an error was sent to the caller. Whatever the end, blocks are given back by one path.
"""

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum

from shoal.decode_worker import metrics
from shoal.decode_worker.child import Child
from shoal.decode_worker.output import Finish, OutputStream
from shoal.decode_worker.reservations import Reservation
from shoal.decode_worker.spec import DecodeSpec
from shoal.engine.sampling import TokenCounts
from shoal.errors import InternalError, ShoalError
from shoal.types import TokenLogprobs


class RequestState(StrEnum):
    """Where a request stands; see the picture above."""

    QUEUED = "queued"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    READY = "ready"
    PREFILLING = "prefilling"
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
    RequestState.READY: {RequestState.PREFILLING, RequestState.RUNNING},
    RequestState.PREFILLING: {RequestState.RUNNING},
    RequestState.RUNNING: {RequestState.FINISHED},
}


class DecodeRequest:
    """The living half of a request. Belongs to the event loop."""

    def __init__(self, spec: DecodeSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.children = _children(spec)
        self.has_forked = len(self.children) == 1  # whether each child has tokens of its own to run
        self.scores: list[TokenLogprobs] = []  # of given tokens, in order
        self.output = OutputStream()
        self.reservation: Reservation | None = None
        self.received_bytes = 0  # payload, counted at the channel
        self.num_prefilled = 0  # prefill tokens that have run here
        loop = asyncio.get_running_loop()
        self.reserved: asyncio.Future[Reservation | None] = loop.create_future()  # None: ended before it had one
        self.ended: asyncio.Future[Finish | ShoalError] = loop.create_future()
        self.state = RequestState.QUEUED
        self._clock = clock
        self.times: dict[RequestState, float] = {RequestState.QUEUED: clock()}
        self.arrived_at = self.times[RequestState.QUEUED] - spec.age_s  # at whichever worker it came first
        self.first_token_at: float | None = None

    def move(self, state: RequestState) -> None:
        """Enter a state and note the time. Raises InternalError for a step the picture does not have."""
        if self.state.is_end or (state not in _NEXT.get(self.state, ()) and state not in (_ENDS - {RequestState.FINISHED})):
            raise InternalError(f"request {self.spec.attempt_id} cannot go from {self.state} to {state}")
        now = self._clock()
        metrics.STATE_SECONDS.labels(self.state).observe(now - self.times[self.state])
        self.state, self.times[state] = state, now

    def end(self, end: Finish | ShoalError) -> None:
        """It is over, for whatever reason. Only the first counts; the request's own task gives everything back."""
        if not self.ended.done():
            self.ended.set_result(end)

    def noted_token(self) -> None:
        """A token has been sampled or scored: note when the first one was."""
        if self.first_token_at is None:
            self.first_token_at = self._clock()

    def token_ids(self, child: Child, start: int, stop: int) -> tuple[int, ...]:
        """Tokens at positions start … stop − 1 of one child's sequence."""
        num_prompt = self.spec.num_prompt_tokens
        answer = self.spec.continuation_ids or child.answer_ids
        return (*self.spec.prompt_ids[start:stop], *answer[max(0, start - num_prompt) : max(0, stop - num_prompt)])

    def num_known_tokens(self, child: Child) -> int:
        """Tokens of a child's sequence that can be run; the last of a continuation is only scored."""
        if self.spec.is_score:
            return self.spec.num_prompt_tokens + len(self.spec.continuation_ids) - 1
        return child.num_known_tokens if self.has_forked else self.spec.num_prompt_tokens

    @property
    def live_children(self) -> list[Child]:
        return [child for child in self.children if child.finish is None]

    @property
    def is_receiving(self) -> bool:
        """Whether a transfer of this request is still to come or under way."""
        return self.state in (RequestState.RESERVED, RequestState.RECEIVING)

    @property
    def prefills(self) -> bool:
        """Whether the request's prefill tokens run here."""
        return self.reservation is not None and self.reservation.prefill.is_local

    @property
    def begins(self) -> bool:
        """Whether no decode token has run yet."""
        return self.state in (RequestState.READY, RequestState.PREFILLING)

    @property
    def num_outstanding_token_layers(self) -> int:
        """Tokens still to be run × layers, with every token it may yet sample (placement's measure of work)."""
        layout = self.spec.layout
        num_to_run = sum(child.num_tokens_to_run for child in self.children)
        if self.spec.is_score:
            num_to_run = max(0, len(self.spec.continuation_ids) - 1 - len(self.scores))
        if self.first_token_at is None:
            num_to_run += layout.split.num_prompt_tokens - layout.split.num_prefill_tokens
        num_to_prefill = layout.split.num_prefill_tokens - self.num_prefilled if self.prefills else 0
        return num_to_run * layout.num_layers + num_to_prefill * len(layout.lower_layers)

    def seconds(self, begin: RequestState, stop: RequestState) -> float | None:
        """From one state to another; None when either was not reached."""
        return self.times[stop] - self.times[begin] if begin in self.times and stop in self.times else None

    def ms_since_reserved(self, moment: float | None) -> float:
        """Milliseconds from the reservation to a moment; 0 when either has not come."""
        reserved = self.times.get(RequestState.RESERVED)
        return 0.0 if moment is None or reserved is None else (moment - reserved) * 1e3


def _children(spec: DecodeSpec) -> list[Child]:
    """Each with counts of its own where penalties need them; the prompt is counted once."""
    prompt = TokenCounts(spec.prompt_ids) if any(child.sampling.has_penalties for child in spec.children) else None
    counts = [None if prompt is None else prompt.copy() for _ in spec.children]
    num_tokens = spec.num_prompt_tokens
    return [Child(child, spec.attempt_id, num_tokens, own) for child, own in zip(spec.children, counts, strict=True)]
