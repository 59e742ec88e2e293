"""One prefill task: where it stands, when it got there, and what of it has been handed to the transfer. Knows no tensors.

    QUEUED ──blocks──▶ HOLDING ──first step──▶ COMPUTING ──last layer──▶ COMPUTED ──acknowledged──▶ SENT
       │                  │                        │                        │
       └──────────────────┴────────────────────────┴────────────────────────┴──▶ CANCELLED │ FAILED

Entries leave while the task is COMPUTING. CANCELLED: the caller left, or decode no longer wants it. FAILED: anything else.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from threading import Lock
from typing import Final

from shoal.errors import InternalError, ShoalError
from shoal.kv_transfer import OutgoingTransfer, SentReport
from shoal.prefill_worker import metrics
from shoal.prefill_worker.export import ExportTracker
from shoal.prefill_worker.spec import PrefillSpec


class TaskState(StrEnum):
    """Where a task stands; see the picture above."""

    QUEUED = "queued"
    HOLDING = "holding"
    COMPUTING = "computing"
    COMPUTED = "computed"
    SENT = "sent"
    CANCELLED = "cancelled"
    FAILED = "failed"


_HEARD_BEFORE_ACCEPT: Final = 8  # each so many layers
_ENDS = frozenset({TaskState.CANCELLED, TaskState.FAILED, TaskState.SENT})
_NEXT = {
    TaskState.QUEUED: TaskState.HOLDING,
    TaskState.HOLDING: TaskState.COMPUTING,
    TaskState.COMPUTING: TaskState.COMPUTED,
    TaskState.COMPUTED: TaskState.SENT,
}


class PrefillTask:
    """The living half of a task. Belongs to the event loop, but `complete` may be called from the step thread."""

    def __init__(self, spec: PrefillSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.state = TaskState.QUEUED
        self.num_computed = 0  # tokens
        self.num_cached = 0  # tokens that were here already
        self.computed = asyncio.Event()  # the step with the last layer is over
        self.export = ExportTracker(spec.plan)  # the step thread's
        self.outgoing: OutgoingTransfer | None = None
        self.publish: Callable[[], None] | None = None  # keeps what was computed for prompts to come; told at the end
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[SentReport | ShoalError] = loop.create_future()
        self.answer: asyncio.Future[SentReport | ShoalError] = loop.create_future()  # what the caller is told
        self._clock = clock
        self.times: dict[TaskState, float] = {TaskState.QUEUED: clock()}
        self._lock = Lock()
        self._complete: list[int] = []  # entries completed before decode has accepted
        self._in_step = False
        self._num_unheard_bytes = 0  # written in this step by layers that were not listened to

    def move(self, state: TaskState) -> None:
        """Enter a state and note the time. Raises InternalError for a step the picture does not have."""
        if self.state in _ENDS or (state is not _NEXT.get(self.state) and state not in (_ENDS - {TaskState.SENT})):
            raise InternalError(f"task {self.spec.attempt_id} cannot go from {self.state} to {state}")
        now = self._clock()
        metrics.STATE_SECONDS.labels(self.state).observe(now - self.times[self.state])
        self.state, self.times[state] = state, now
        if state is TaskState.COMPUTED:
            self.computed.set()

    def end(self, end: SentReport | ShoalError) -> None:
        """It is over, for whatever reason. Only the first counts; the task's own asyncio task gives everything back."""
        if not self.ended.done():
            self.ended.set_result(end)

    def begin_step(self) -> None:
        """A step is about to run some of its tokens."""
        with self._lock:
            self._in_step = True
            if self.outgoing is not None:
                self.outgoing.begin_step()

    def hears(self, layer: int, stop: int) -> bool:
        """Whether something might leave once tokens 0 … stop − 1 are written at this layer. Asked of a step's layers in order."""
        self._num_unheard_bytes += self.export.num_bytes_at(layer, stop)
        with self._lock:
            if self.outgoing is None:  # decode may accept while the step runs
                return layer % _HEARD_BEFORE_ACCEPT == _HEARD_BEFORE_ACCEPT - 1
            return self.outgoing.is_worth(self._num_unheard_bytes)

    def written(self, layers: range, stop: int) -> None:
        """Tokens 0 … stop − 1 are written at these layers, all since a step last spoke: whatever that completes may go."""
        self._num_unheard_bytes = 0
        self.complete(self.export.layers_written(layers, stop))

    def complete(self, entries: Sequence[int]) -> None:
        """These entries' bytes exist. Nothing goes before decode has accepted. Any thread."""
        with self._lock:
            if self.outgoing is not None:
                self.outgoing.complete(entries)
            else:
                self._complete.extend(entries)

    def end_step(self) -> None:
        """The step is over: whatever is complete leaves. Any thread."""
        with self._lock:
            self._in_step = False
            if self.outgoing is not None:
                self.outgoing.end_step()

    def attach(self, outgoing: OutgoingTransfer) -> None:
        """Decode has accepted: send what is complete and whatever completes from now on."""
        with self._lock:
            self.outgoing = outgoing
            outgoing.complete(self._complete)
            self._complete = []
            if self._in_step:
                outgoing.begin_step()
            else:
                outgoing.end_step()

    @property
    def num_outstanding_token_layers(self) -> int:
        """Tokens still to be run × layers (placement's measure of work; projections above K are left out)."""
        if self.state is TaskState.SENT or self.ended.done():
            return 0
        return (len(self.spec.token_ids) - self.num_computed) * len(self.spec.layout.lower_layers)

    def seconds(self, begin: TaskState, stop: TaskState) -> float:
        """From one state to another; 0.0 when either was not reached."""
        if begin not in self.times or stop not in self.times:
            return 0.0
        return self.times[stop] - self.times[begin]
