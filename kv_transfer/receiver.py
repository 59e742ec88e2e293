"""The receiving half of a pair's protocol (design §5): events in, actions out. Knows no streams, threads, tensors or clock.

A message's life: `Ready{n}` waiting → (place and buffer granted) posting → posted, `Go{n}` → arrived → unpacked; or `Skip{n}`,
when its attempt has ended before it was posted. Every n is answered, in order of n. What was posted is never given up: its
buffer stays quarantined until the receive returns.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shoal.errors import InternalError, Mismatch, ShoalError, Unavailable
from shoal.kv_transfer import wire
from shoal.kv_transfer.actions import (
    Accepted,
    Action,
    ClosePair,
    Finish,
    FreeBuffer,
    Post,
    Quarantine,
    Rejected,
    ReturnBuffer,
    Skipped,
    WantBuffer,
    Write,
    combine_checksums,
)
from shoal.kv_transfer.attempts import AttemptBook
from shoal.kv_transfer.handle import Handle
from shoal.pb.internal.v1 import transfer_pb2 as pb
from shoal.placement.plan import Entry, TransferPlan, entries_bytes


class _Stage(Enum):
    WAITING = auto()  # for a place and a buffer
    UNWANTED = auto()  # will be skipped in its turn
    POSTING = auto()
    POSTED = auto()


@dataclass(slots=True)
class _Message:
    n: int
    attempt_id: str
    num_bytes: int
    entries: tuple[Entry, ...]  # none when the attempt had ended before its Ready came
    stage: _Stage


@dataclass(slots=True)
class _Attempt:
    plan: TransferPlan
    announced: set[int] = field(default_factory=set)  # entries that got their Ready
    crcs: dict[int, int] = field(default_factory=dict)  # of unpacked entries
    checksum: int | None = None  # the Trailer's
    payload_bytes: int = 0
    header_bytes: int = 0


class ReceiverMachine:
    """One pair's receiving half. Every method returns the actions it causes, to be carried out in order."""

    def __init__(self, book: AttemptBook, *, max_receives: int, max_joined_bytes: int = 0) -> None:
        self._book = book  # shared by the worker's pairs
        self._max_joined_bytes = max_joined_bytes  # of a message with several entries
        self._max_receives = max_receives
        self._attempts: dict[str, _Attempt] = {}
        self._unanswered: deque[_Message] = deque()  # in order of n
        self._held: dict[int, _Message] = {}  # messages with a buffer, by n
        self._next_n = 0
        self._wanting = False
        self._closed = False

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    def on_message(self, message: pb.SenderMessage) -> list[Action]:
        """Whatever prefill wrote, but `Hello` and heartbeats."""
        if self._closed:
            return []
        match message.WhichOneof("message"):
            case "ready":
                return self._on_ready(message)
            case "open":
                return self._on_open(message)
            case "trailer":
                attempt = self._attempts.get(message.trailer.attempt_id)
                if attempt is None:
                    return []
                attempt.header_bytes += message.ByteSize()
                attempt.checksum = message.trailer.checksum
                return self._complete(message.trailer.attempt_id)
            case "end":
                return self._on_end(message)
            case kind:
                return [ClosePair(InternalError(f"prefill sent {kind!r} where it does not belong"))]

    def granted(self) -> list[Action]:
        """The place and buffer asked for by WantBuffer are there."""
        self._wanting = False
        waiting = next((m for m in self._unanswered if m.stage is _Stage.WAITING), None)
        if waiting is None:
            return [ReturnBuffer()]
        waiting.stage = _Stage.POSTING
        self._held[waiting.n] = waiting
        return [Post(waiting.n, waiting.attempt_id, waiting.entries), *self._want()]

    def posted(self, n: int) -> list[Action]:
        """The receive of message n has been posted: the peer may send."""
        self._held[n].stage = _Stage.POSTED
        return self._answer()

    def arrived(self, n: int, num_bytes: int) -> list[Action]:
        """The receive of message n has returned with its bytes, not yet unpacked."""
        attempt = self._attempts.get(self._held[n].attempt_id)
        if attempt is not None:
            attempt.payload_bytes += num_bytes
        return []

    def unpacked(self, n: int, crcs: Sequence[int] | None, error: ShoalError | None = None) -> list[Action]:
        """Message n is in the sink, or (crcs None) was dropped: its attempt had ended, or the sink failed with `error`."""
        message = self._held.pop(n)
        actions: list[Action] = [FreeBuffer(n)]
        attempt = self._attempts.get(message.attempt_id)
        if attempt is not None:
            if crcs is None:
                actions += self._end(message.attempt_id, error or InternalError("the KV sink was closed under its transfer"))
            else:
                attempt.crcs.update((entry.index, crc) for entry, crc in zip(message.entries, crcs, strict=True))
                actions += self._complete(message.attempt_id)
        return actions + self._want()

    def failed(self, n: int) -> list[Action]:
        """The receive could not be posted, or has returned with an error: its buffer is free. The driver closes the pair."""
        self._held.pop(n)
        return [FreeBuffer(n)]

    def cancel(self, attempt_id: str, error: ShoalError) -> list[Action]:
        """This end no longer wants the attempt. Harmless for one that is unknown here or has ended."""
        return self._end(attempt_id, error) + self._answer() if attempt_id in self._attempts else []

    def closed(self, error: ShoalError) -> list[Action]:
        """The pair is gone: every attempt ends; buffers with a posted receive wait for its return."""
        if self._closed:
            return []
        self._closed = True
        self._unanswered.clear()
        actions: list[Action] = []
        for attempt_id in list(self._attempts):
            actions += self._end(attempt_id, error)
        return actions

    def _on_open(self, message: pb.SenderMessage) -> list[Action]:
        attempt_id = message.open.attempt_id
        if not 0 < len(attempt_id) <= wire.MAX_ID_CHARACTERS:  # an empty id would mean the whole pair
            return [ClosePair(InternalError(f"prefill opened an attempt whose id has {len(attempt_id)} characters"))]
        try:
            handle = Handle.decode(message.open.handle)
            if handle.attempt_id != attempt_id:
                raise Mismatch(f"attempt_id: {attempt_id} != {handle.attempt_id} in its handle")
            plan = self._book.claim(handle)
        except ShoalError as error:
            return [Write(wire.rejection(attempt_id, error)), Rejected(error)]
        attempt = self._attempts[attempt_id] = _Attempt(plan)
        attempt.header_bytes += message.ByteSize()
        accept = pb.ReceiverMessage(accept=pb.Accept(attempt_id=attempt_id))
        return [Accepted(attempt_id), _write(attempt, accept)]

    def _on_ready(self, message: pb.SenderMessage) -> list[Action]:
        ready = message.ready
        if ready.n != self._next_n:
            return [ClosePair(InternalError(f"prefill numbered a message {ready.n} where {self._next_n} is due"))]
        self._next_n += 1
        attempt = self._attempts.get(ready.attempt_id)
        if attempt is None:
            if self._book.is_expected(ready.attempt_id):
                return [ClosePair(InternalError(f"prefill announced a message of attempt {ready.attempt_id} before its Accept"))]
            self._unanswered.append(_Message(ready.n, ready.attempt_id, ready.num_bytes, (), _Stage.UNWANTED))
            return self._answer()
        first, stop = ready.entry, ready.entry + ready.num_more + 1
        entries = attempt.plan.entries[first:stop]
        if stop > len(attempt.plan.entries) or any(entry.index in attempt.announced for entry in entries):
            what = f"entry {first}" if stop == first + 1 else f"one of the entries {first} to {stop - 1}"
            return [ClosePair(InternalError(f"{what} of attempt {ready.attempt_id} is not in its plan, or came twice"))]
        num_bytes = entries_bytes(entries)
        if ready.num_bytes != num_bytes:
            words = f"message {ready.n}, from entry {first}, has {ready.num_bytes} bytes at prefill, {num_bytes} in decode's plan"
            return [ClosePair(Mismatch(words + "; nothing was received"))]
        if ready.num_more and num_bytes > self._max_joined_bytes:
            words = f"message {ready.n} joins entries to {num_bytes} bytes, more than {self._max_joined_bytes}"
            return [ClosePair(InternalError(words + "; nothing was received"))]
        attempt.announced.update(range(first, stop))
        attempt.header_bytes += message.ByteSize()
        self._unanswered.append(_Message(ready.n, ready.attempt_id, num_bytes, entries, _Stage.WAITING))
        return self._want()

    def _on_end(self, message: pb.SenderMessage) -> list[Action]:
        end = message.end
        if end.HasField("last_n") and end.last_n >= self._next_n:
            return [ClosePair(InternalError(f"prefill ended an attempt with message {end.last_n}, which was never announced"))]
        attempt = self._attempts.get(end.attempt_id)
        if attempt is None:
            return []
        attempt.header_bytes += message.ByteSize()
        error = Unavailable(f"the prefill worker gave the transfer up: {end.reason}")
        return self._end(end.attempt_id, error, tell=False) + self._answer()

    def _complete(self, attempt_id: str) -> list[Action]:
        attempt = self._attempts[attempt_id]
        num_entries = len(attempt.plan.entries)
        if attempt.checksum is None or len(attempt.crcs) < num_entries:
            return []
        checksum = combine_checksums([attempt.crcs[index] for index in range(num_entries)])
        if checksum != attempt.checksum:
            words = f"checksum {checksum:08x} of the received KV differs from the sender's {attempt.checksum:08x}"
            return self._end(attempt_id, ChecksumMismatch(words + "; nothing of it was used"))
        del self._attempts[attempt_id]
        ack = _write(attempt, pb.ReceiverMessage(ack=pb.Ack(attempt_id=attempt_id)))
        return [ack, Finish(attempt_id, None, attempt.payload_bytes, attempt.header_bytes)]

    def _end(self, attempt_id: str, error: ShoalError, *, tell: bool = True) -> list[Action]:
        attempt = self._attempts.pop(attempt_id)
        actions: list[Action] = []
        if tell and not self._closed:
            actions.append(_write(attempt, wire.rejection(attempt_id, error)))
        for message in self._unanswered:
            if message.attempt_id == attempt_id and message.stage is _Stage.WAITING:
                message.stage = _Stage.UNWANTED
        actions += [Quarantine(n) for n, message in self._held.items() if message.attempt_id == attempt_id]
        actions.append(Finish(attempt_id, error, attempt.payload_bytes, attempt.header_bytes))
        return actions

    def _answer(self) -> list[Action]:
        """Answer from the head, in order of n, as far as each one's answer is known."""
        actions: list[Action] = []
        while self._unanswered and self._unanswered[0].stage in (_Stage.POSTED, _Stage.UNWANTED):
            message = self._unanswered.popleft()
            if message.stage is _Stage.UNWANTED:
                actions += [Write(pb.ReceiverMessage(skip=pb.Skip(n=message.n))), Skipped(message.num_bytes)]
                continue
            go = pb.ReceiverMessage(go=pb.Go(n=message.n))
            attempt = self._attempts.get(message.attempt_id)
            actions.append(Write(go) if attempt is None else _write(attempt, go))
        return actions

    def _want(self) -> list[Action]:
        waits = any(message.stage is _Stage.WAITING for message in self._unanswered)
        if self._wanting or self._closed or not waits or len(self._held) >= self._max_receives:
            return []
        self._wanting = True
        return [WantBuffer()]


class ChecksumMismatch(Unavailable):
    """The received bytes are not the sent ones. Retry is safe."""


def _write(attempt: _Attempt, message: pb.ReceiverMessage) -> Write:
    attempt.header_bytes += message.ByteSize()
    return Write(message)
