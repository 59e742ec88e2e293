"""The sending half of a pair's protocol (design §5): events in, actions out. Knows no streams, threads, tensors or clock.

A message carries one entry, or several that follow one another in the plan and were ready together. Its life: ready → (buffer
granted) packing → `Ready{n}` announced → `Go{n}` issued → sent, or `Skip{n}`. Or its buffer is lent to a running step, which
fills it itself. Messages are numbered over all attempts of the pair. An ended attempt numbers no new message, but what was
announced still gets its answer, and a `Go` is always followed by its send: the peer's receive has been posted.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shoal.errors import Cancelled, InternalError, ShoalError, Unavailable
from shoal.kv_transfer import wire
from shoal.kv_transfer.actions import (
    Accepted,
    Action,
    ClosePair,
    Finish,
    FreeBuffer,
    Issue,
    Pack,
    Quarantine,
    ReturnBuffer,
    WantBuffer,
    Write,
    combine_checksums,
)
from shoal.pb.internal.v1 import transfer_pb2 as pb
from shoal.placement.plan import Entry, TransferPlan, entries_bytes


class _Stage(Enum):
    PACKING = auto()  # here, or by the step that the buffer is lent to
    ANNOUNCED = auto()  # Ready{n} is out
    ISSUED = auto()  # Go{n} came, the send is out


@dataclass(slots=True)
class _Message:
    attempt_id: str
    entries: tuple[Entry, ...]
    stage: _Stage = _Stage.PACKING
    n: int = -1


@dataclass(slots=True)
class _Attempt:
    plan: TransferPlan
    progress_s: float  # when either end last did something for it
    accepted: bool = False
    trailer_sent: bool = False
    acked: bool = False
    waiting: list[int] = field(default_factory=list)  # ready before Accept
    given: set[int] = field(default_factory=set)  # entries ever reported ready
    crcs: dict[int, int] = field(default_factory=dict)  # of announced entries
    num_outstanding: int = 0  # messages announced or issued
    last_n: int | None = None
    payload_bytes: int = 0
    header_bytes: int = 0

    def take(self, index: int) -> bool:
        """Note that an entry's bytes exist. False: it was reported before, or is not in the plan."""
        if index in self.given or not 0 <= index < len(self.plan.entries):
            return False
        self.given.add(index)
        return True


class SenderMachine:
    """One pair's sending half. Every method returns the actions it causes, to be carried out in order."""

    def __init__(self, *, window: int, lease_s: float, max_joined_bytes: int = 0) -> None:
        self._window = window  # buffers a pair may hold at once
        self._max_joined_bytes = max_joined_bytes  # of a message with several entries
        self._lease_s = lease_s
        self._attempts: dict[str, _Attempt] = {}
        self._queue: deque[tuple[str, int]] = deque()  # ready entries of accepted attempts, in the order they became ready
        self._messages: dict[int, _Message] = {}  # by ticket
        self._tickets: dict[int, int] = {}  # n → ticket, announced and issued messages
        self._next_ticket = 0
        self._next_n = 0
        self._wanting = False
        self._closed = False

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    @property
    def is_idle(self) -> bool:
        """No attempt lives and no message awaits its answer or return."""
        return not self._attempts and not self._messages

    def open(self, attempt_id: str, handle: bytes, plan: TransferPlan, now_s: float) -> list[Action]:
        """Start an attempt. Raises InternalError for an id in use and Unavailable on a closed pair."""
        if self._closed:
            raise Unavailable("the pair to the decode worker has closed")
        if attempt_id in self._attempts:
            raise InternalError(f"attempt {attempt_id} is already open on this pair")
        attempt = self._attempts[attempt_id] = _Attempt(plan, now_s)
        return [_write(attempt, pb.SenderMessage(open=pb.Open(attempt_id=attempt_id, handle=handle)))]

    def entries_ready(self, attempt_id: str, indices: Iterable[int], now_s: float) -> list[Action]:
        """The bytes of these entries exist. One reported twice, or outside the plan, ends the attempt (InternalError)."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return []
        for index in indices:
            if not attempt.take(index):
                return self._end(attempt_id, InternalError(f"entry {index} was reported ready twice, or is not in the plan"))
            if attempt.accepted:
                self._queue.append((attempt_id, index))
            else:
                attempt.waiting.append(index)
        if attempt.accepted:
            attempt.progress_s = now_s
        return self._want()

    def on_message(self, message: pb.ReceiverMessage, now_s: float) -> list[Action]:
        """Whatever decode wrote, but `Welcome` and heartbeats. Unknown attempts are ignored: they have ended here."""
        match message.WhichOneof("message"):
            case "go":
                return self._on_go(message, now_s)
            case "skip":
                return self._on_skip(message)
            case "accept":
                return self._on_accept(message, now_s)
            case "reject":
                return self._on_reject(message)
            case "ack":
                return self._on_ack(message)
            case kind:
                return [ClosePair(InternalError(f"decode sent {kind!r} where it does not belong"))]

    def granted(self) -> list[Action]:
        """The buffer asked for by WantBuffer is there."""
        self._wanting = False
        while self._queue:
            attempt_id, index = self._queue.popleft()
            attempt = self._attempts.get(attempt_id)
            if attempt is None:
                continue
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            entries = self._joined(attempt_id, attempt.plan, index)
            self._messages[ticket] = _Message(attempt_id, entries)
            return [Pack(ticket, attempt_id, entries), *self._want()]
        return [ReturnBuffer()]

    def lend(self, attempt_id: str) -> int | None:
        """A step is to fill a buffer by itself: its ticket. None where that must wait, and nothing has happened.

        It may keep the buffer for as long as the step runs, so what is ready comes first, and finds a place in the window.
        """
        attempt = self._attempts.get(attempt_id)
        is_room = not self._queue and len(self._messages) + 1 < self._window
        if self._closed or attempt is None or not attempt.accepted or not is_room:
            return None
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._messages[ticket] = _Message(attempt_id, ())
        return ticket

    def filled(
        self, ticket: int, entries: Sequence[Entry], crcs: Sequence[int] | None, now_s: float, error: ShoalError | None = None
    ) -> list[Action]:
        """A lent buffer comes back: with entries that follow one another, or empty; with an `error`, the attempt has failed."""
        message = self._messages[ticket]
        attempt = self._attempts.get(message.attempt_id)
        message.entries = tuple(entries)
        if attempt is None or error is not None:
            return self.packed(ticket, None, now_s, error)
        if not entries:
            del self._messages[ticket]
            return [FreeBuffer(ticket), *self._want()]
        if wrong := [entry.index for entry in entries if not attempt.take(entry.index)]:
            error = InternalError(f"entry {wrong[0]} was reported ready twice, or is not in the plan")
            return self.packed(ticket, None, now_s, error)
        return self.packed(ticket, crcs, now_s)

    def packed(
        self, ticket: int, crcs: Sequence[int] | None, now_s: float, error: ShoalError | None = None, lent: pb.Lent | None = None
    ) -> list[Action]:
        """The entries have been packed, or lie where `lent` says.

        Without checksums (None) the source had been closed, or failed with `error`.
        """
        message = self._messages[ticket]
        attempt = self._attempts.get(message.attempt_id)
        if attempt is None or crcs is None:
            del self._messages[ticket]
            actions: list[Action] = [FreeBuffer(ticket)]
            if attempt is not None:
                actions += self._end(message.attempt_id, error or InternalError("the KV source was closed under its transfer"))
            return actions + self._want()
        n, self._next_n = self._next_n, self._next_n + 1
        message.stage, message.n = _Stage.ANNOUNCED, n
        self._tickets[n] = ticket
        attempt.last_n, attempt.progress_s = n, now_s
        attempt.num_outstanding += 1
        entries = message.entries
        attempt.crcs.update((entry.index, crc) for entry, crc in zip(entries, crcs, strict=True))
        ready = pb.Ready(
            n=n,
            attempt_id=message.attempt_id,
            entry=entries[0].index,
            num_bytes=entries_bytes(entries),
            num_more=len(entries) - 1,
            lent=lent,
        )
        actions = [_write(attempt, pb.SenderMessage(ready=ready))]
        num_entries = len(attempt.plan.entries)
        if len(attempt.crcs) == num_entries:
            checksum = combine_checksums([attempt.crcs[index] for index in range(num_entries)])
            trailer = pb.Trailer(attempt_id=message.attempt_id, checksum=checksum)
            actions.append(_write(attempt, pb.SenderMessage(trailer=trailer)))
            attempt.trailer_sent = True
        return actions

    def sent(self, ticket: int, num_bytes: int, now_s: float) -> list[Action]:
        """The send has returned after `num_bytes` bytes."""
        message, attempt = self._returned(ticket)
        actions: list[Action] = [FreeBuffer(ticket)]
        if attempt is not None:
            attempt.payload_bytes += num_bytes
            attempt.progress_s = now_s
            if attempt.acked and not attempt.num_outstanding:
                actions += self._end(message.attempt_id, None)
        return actions + self._want()

    def failed(self, ticket: int) -> list[Action]:
        """The send has returned with an error: its buffer is free. The driver closes the pair."""
        self._returned(ticket)
        return [FreeBuffer(ticket)]

    def cancel(self, attempt_id: str, error: ShoalError) -> list[Action]:
        """Give an attempt up from this side. Harmless for one that is unknown or has ended."""
        return self._end(attempt_id, error) if attempt_id in self._attempts else []

    def sweep(self, now_s: float) -> list[Action]:
        """End every attempt that has waited longer than its lease for the other end."""
        actions: list[Action] = []
        for attempt_id, attempt in list(self._attempts.items()):
            waits = not attempt.accepted or attempt.num_outstanding or attempt.trailer_sent
            if waits and now_s - attempt.progress_s > self._lease_s:
                missing = "Accept" if not attempt.accepted else "Go" if attempt.num_outstanding else "Ack"
                actions += self._end(attempt_id, Unavailable(f"no {missing} from the decode worker in {self._lease_s:g} s"))
        return actions

    def closed(self, error: ShoalError) -> list[Action]:
        """The pair is gone: every attempt ends; buffers whose send was issued wait for its return."""
        if self._closed:
            return []
        self._closed = True
        actions: list[Action] = []
        for attempt_id in list(self._attempts):
            actions += self._end(attempt_id, error)
        for ticket, message in list(self._messages.items()):
            if message.stage is _Stage.ANNOUNCED:
                self._returned(ticket)
                actions.append(FreeBuffer(ticket))
        self._queue.clear()
        return actions

    def _on_accept(self, message: pb.ReceiverMessage, now_s: float) -> list[Action]:
        attempt_id = message.accept.attempt_id
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.accepted:
            return []
        attempt.header_bytes += message.ByteSize()
        attempt.accepted, attempt.progress_s = True, now_s
        self._queue.extend((attempt_id, index) for index in attempt.waiting)
        attempt.waiting.clear()
        return [Accepted(attempt_id), *self._want()]

    def _on_reject(self, message: pb.ReceiverMessage) -> list[Action]:
        attempt = self._attempts.get(message.reject.attempt_id)
        if attempt is None:
            return []
        attempt.header_bytes += message.ByteSize()
        return self._end(message.reject.attempt_id, wire.rejected(message.reject))

    def _on_ack(self, message: pb.ReceiverMessage) -> list[Action]:
        attempt = self._attempts.get(message.ack.attempt_id)
        if attempt is None:
            return []
        if not attempt.trailer_sent:
            return [ClosePair(InternalError("decode acknowledged an attempt that has not been sent whole"))]
        attempt.header_bytes += message.ByteSize()
        attempt.acked = True
        return [] if attempt.num_outstanding else self._end(message.ack.attempt_id, None)

    def _on_go(self, message: pb.ReceiverMessage, now_s: float) -> list[Action]:
        n = message.go.n
        ticket = self._tickets.get(n)
        if ticket is None or self._messages[ticket].stage is not _Stage.ANNOUNCED:
            return [ClosePair(InternalError(f"decode answered message {n} with Go, but it is not waiting for an answer"))]
        mine = self._messages[ticket]
        mine.stage = _Stage.ISSUED
        attempt = self._attempts.get(mine.attempt_id)
        if attempt is not None:
            attempt.header_bytes += message.ByteSize()
            attempt.progress_s = now_s
        return [Issue(ticket, n, entries_bytes(mine.entries))]

    def _on_skip(self, message: pb.ReceiverMessage) -> list[Action]:
        n = message.skip.n
        ticket = self._tickets.get(n)
        if ticket is None or self._messages[ticket].stage is not _Stage.ANNOUNCED:
            return [ClosePair(InternalError(f"decode answered message {n} with Skip, but it is not waiting for an answer"))]
        mine, attempt = self._returned(ticket)
        actions: list[Action] = [FreeBuffer(ticket)]
        if attempt is not None:
            attempt.header_bytes += message.ByteSize()
            actions += self._end(mine.attempt_id, Cancelled("the decode worker no longer wants this transfer"))
        return actions + self._want()

    def _joined(self, attempt_id: str, plan: TransferPlan, index: int) -> tuple[Entry, ...]:
        """An entry, and those next in the queue that follow it in the plan and fit into one message with it."""
        entries = [plan.entries[index]]
        num_bytes = entries[0].num_bytes
        while self._queue and self._queue[0] == (attempt_id, entries[-1].index + 1):
            following = plan.entries[entries[-1].index + 1]
            num_bytes += following.num_bytes
            if num_bytes > self._max_joined_bytes:
                break
            entries.append(following)
            self._queue.popleft()
        return tuple(entries)

    def _returned(self, ticket: int) -> tuple[_Message, _Attempt | None]:
        message = self._messages.pop(ticket)
        del self._tickets[message.n]
        attempt = self._attempts.get(message.attempt_id)
        if attempt is not None:
            attempt.num_outstanding -= 1
        return message, attempt

    def _end(self, attempt_id: str, error: ShoalError | None) -> list[Action]:
        attempt = self._attempts.pop(attempt_id)
        if attempt.acked:
            error = None  # decode holds everything: nothing can fail any more
        actions: list[Action] = []
        if not attempt.acked and not self._closed:
            end = pb.End(attempt_id=attempt_id, last_n=attempt.last_n, reason=str(error))
            actions.append(_write(attempt, pb.SenderMessage(end=end)))
        for ticket, message in self._messages.items():
            if message.attempt_id == attempt_id and message.stage is not _Stage.PACKING:
                actions.append(Quarantine(ticket))
        actions.append(Finish(attempt_id, error, attempt.payload_bytes, attempt.header_bytes))
        return actions

    def _want(self) -> list[Action]:
        if self._wanting or self._closed or not self._queue or len(self._messages) >= self._window:
            return []
        self._wanting = True
        return [WantBuffer()]


def _write(attempt: _Attempt, message: pb.SenderMessage) -> Write:
    attempt.header_bytes += message.ByteSize()
    return Write(message)
