"""A pair in one process without I/O: both machines, their streams and channel as queues, every buffer accounted for."""

import zlib
from collections import deque
from collections.abc import Callable

from shoal.errors import Cancelled, ShoalError, Unavailable
from shoal.kv_transfer import actions as act
from shoal.kv_transfer.attempts import AttemptBook
from shoal.kv_transfer.handle import Handle
from shoal.kv_transfer.perform import Performer
from shoal.kv_transfer.receiver import ReceiverMachine
from shoal.kv_transfer.sender import SenderMachine
from shoal.pb.internal.v1 import transfer_pb2 as pb
from shoal.placement.plan import Entry, EntryKind, TransferPlan
from shoal.types import DType, Fingerprint

FINGERPRINT = Fingerprint("r1", "", 4, 64, 2, 16, DType.FLOAT32, 16, "theta=10000", 1 << 16, 64)


def toy_plan(*sizes: int) -> TransferPlan:
    """A plan with entries of these sizes; its digest is its sizes."""
    entries = tuple(Entry(i, EntryKind.KV, i, 0, 1, size) for i, size in enumerate(sizes))
    return TransferPlan(entries, "-".join(map(str, sizes)))


def toy_handle(attempt_id: str, plan: TransferPlan, **changes: object) -> Handle:
    """A handle for `plan`."""
    fields = {"fingerprint": FINGERPRINT, "visibility": "full:boundary=1", "num_prompt_tokens": 9, "num_cached_tokens": 0}
    return Handle(**{"attempt_id": attempt_id, "plan_digest": plan.digest, **fields, **changes})  # type: ignore[arg-type]


def crc_of(attempt_id: str, index: int) -> int:
    """What packing and unpacking an entry would compute."""
    return zlib.crc32(f"{attempt_id}/{index}".encode())


def crcs_of(message: act.Pack | act.Post) -> list[int]:
    """The same of all entries of a message."""
    return [crc_of(message.attempt_id, entry.index) for entry in message.entries]


class Pair:
    """Both ends of one pair. `steps()` lists what could happen next, as calls. Checks the promises of the protocol as it goes."""

    def __init__(self, num_buffers: int = 3, max_receives: int = 2, lease_s: float = 10.0, max_joined_bytes: int = 0) -> None:
        self.now_s = 0.0
        self.max_joined_bytes = max_joined_bytes
        self.book = AttemptBook(lease_s=lease_s, remember_s=100.0)
        self.sender = SenderMachine(window=max_receives + 1, lease_s=lease_s, max_joined_bytes=max_joined_bytes)
        self.receiver = ReceiverMachine(self.book, max_receives=max_receives, max_joined_bytes=max_joined_bytes)
        self.to_receiver: deque[pb.SenderMessage] = deque()
        self.to_sender: deque[pb.ReceiverMessage] = deque()
        self.plans: dict[str, TransferPlan] = {}
        self.finished: dict[str, dict[str, act.Finish]] = {"sender": {}, "receiver": {}}
        self.free = {"sender": num_buffers, "receiver": num_buffers}
        self.num_buffers = num_buffers
        self.held: dict[str, dict[int, str]] = {"sender": {}, "receiver": {}}  # key → attempt
        self.quarantined: dict[str, set[int]] = {"sender": set(), "receiver": set()}
        self.granted = {"sender": False, "receiver": False}
        self.wanting = {"sender": False, "receiver": False}
        self.packing: list[act.Pack] = []
        self.lent: dict[int, str] = {}  # ticket → attempt whose step fills the buffer
        self.posting: deque[act.Post] = deque()
        self.posted: deque[act.Post] = deque()  # the channel, receiving end
        self.issued: deque[act.Issue] = deque()  # the channel, sending end
        self.arrived: list[act.Post] = []
        self.closed_with: ShoalError | None = None
        self.is_closed = False
        self.answered: list[int] = []
        self.num_accepted = 0
        self._send = Performer(self._do_sender)
        self._receive = Performer(self._do_receiver)

    def expect(self, attempt_id: str, plan: TransferPlan) -> None:
        self.plans[attempt_id] = plan
        self.book.expect(toy_handle(attempt_id, plan), plan, self.now_s)

    def open(self, attempt_id: str, plan: TransferPlan) -> None:
        self.plans[attempt_id] = plan
        self._send(self.sender.open(attempt_id, toy_handle(attempt_id, plan).encode(), plan, self.now_s))

    def ready(self, attempt_id: str, *indices: int) -> None:
        self._send(self.sender.entries_ready(attempt_id, indices, self.now_s))

    def lend(self, attempt_id: str) -> bool:
        """Lend a buffer to a step of the attempt, if there is one and the sender allows it."""
        if not self.free["sender"] or (ticket := self.sender.lend(attempt_id)) is None:
            return False
        self.free["sender"] -= 1
        self.held["sender"][ticket] = self.lent[ticket] = attempt_id
        return True

    def fill(self, ticket: int, *indices: int) -> None:
        """A lent buffer comes back, with these entries of its attempt; with none if that has ended."""
        attempt_id = self.lent.pop(ticket)
        entries = [self.plans[attempt_id].entries[index] for index in indices]
        crcs = None if attempt_id in self.finished["sender"] else [crc_of(attempt_id, index) for index in indices]
        self._send(self.sender.filled(ticket, entries if crcs else (), crcs or None, self.now_s))

    def cancel_at_sender(self, attempt_id: str) -> None:
        self._send(self.sender.cancel(attempt_id, Cancelled("test")))

    def cancel_at_receiver(self, attempt_id: str) -> None:
        self._receive(self.receiver.cancel(attempt_id, Cancelled("test")))
        if self.book.end(attempt_id, self.now_s):
            self.finished["receiver"][attempt_id] = act.Finish(attempt_id, Cancelled("test"), 0, 0)

    def sweep(self) -> None:
        self._send(self.sender.sweep(self.now_s))

    def close(self) -> None:
        """The stream has ended: both ends notice; what is on the channel fails."""
        self.is_closed = True
        self.to_receiver.clear()
        self.to_sender.clear()
        self._send(self.sender.closed(Unavailable("closed")))
        self._receive(self.receiver.closed(Unavailable("closed")))

    def steps(self) -> list[Callable[[], None]]:
        """Everything that can happen next but for opens, cancels and closing."""
        steps: list[Callable[[], None]] = []
        if self.to_receiver:
            steps.append(self._deliver_to_receiver)
        if self.to_sender:
            steps.append(self._deliver_to_sender)
        if self.packing:
            steps.append(self._finish_packing)
        if self.posting:
            steps.append(self._finish_posting)
        if self.issued or (self.is_closed and self.posted):
            steps.append(self._move)
        if self.arrived:
            steps.append(self._unpack)
        for end in ("sender", "receiver"):
            if self.wanting[end] and self.free[end]:
                steps.append(lambda end=end: self._grant(end))  # type: ignore[misc]
        return steps

    def run(self, choose: Callable[[int], int] = lambda count: 0) -> None:
        """Take steps until nothing can happen."""
        while steps := self.steps():
            steps[choose(len(steps))]()

    def check_idle(self) -> None:
        """Nothing is held, nothing is quarantined, every buffer is free: free + owned = total when all is quiet."""
        for end in ("sender", "receiver"):
            assert self.free[end] == self.num_buffers, f"{end} has lost buffers"
            assert not self.held[end] and not self.quarantined[end]
        assert self.sender.is_idle and not self.receiver.num_attempts
        assert not self.posted and not self.issued

    def _deliver_to_receiver(self) -> None:
        self._receive(self.receiver.on_message(self.to_receiver.popleft()))

    def _deliver_to_sender(self) -> None:
        self._send(self.sender.on_message(self.to_sender.popleft(), self.now_s))

    def _finish_packing(self) -> None:
        pack = self.packing.pop(0)
        self._send(self.sender.packed(pack.ticket, crcs_of(pack), self.now_s))

    def _finish_posting(self) -> None:
        post = self.posting.popleft()
        if self.is_closed:
            self._receive(self.receiver.failed(post.n))
            return
        self.posted.append(post)
        self._receive(self.receiver.posted(post.n))

    def _move(self) -> None:
        """One message crosses the channel, or fails there when the pair has been closed."""
        if self.is_closed:
            if self.issued:
                self._send(self.sender.failed(self.issued.popleft().ticket))
            if self.posted:
                self._receive(self.receiver.failed(self.posted.popleft().n))
            return
        issue, post = self.issued.popleft(), self.posted.popleft()
        assert (issue.n, issue.num_bytes) == (post.n, post.num_bytes), "order or size differs between the two ends"
        self._send(self.sender.sent(issue.ticket, issue.num_bytes, self.now_s))
        self.arrived.append(post)
        self._receive(self.receiver.arrived(post.n, post.num_bytes))

    def _unpack(self) -> None:
        post = self.arrived.pop(0)
        lives = post.attempt_id not in self.finished["receiver"]
        self._receive(self.receiver.unpacked(post.n, crcs_of(post) if lives else None))

    def _grant(self, end: str) -> None:
        self.wanting[end] = False
        self.free[end] -= 1
        self.granted[end] = True
        if end == "sender":
            self._send(self.sender.granted())
        else:
            self._receive(self.receiver.granted())

    def _do_sender(self, action: act.Action) -> None:
        match action:
            case act.Write(message=pb.SenderMessage() as message):
                if message.HasField("ready"):
                    assert message.ready.attempt_id not in self.finished["sender"], "an ended attempt announced a message"
                self.to_receiver.append(message)
            case act.Pack():
                self._hold("sender", action.ticket, action.attempt_id)
                self.packing.append(action)
            case act.Issue():
                if not self.is_closed:
                    assert len(self.issued) < len(self.posted), "a send was issued before its receive was posted"
                self.issued.append(action)
            case act.Accepted():
                self.num_accepted += 1
            case _:
                self._do("sender", action)

    def _do_receiver(self, action: act.Action) -> None:
        match action:
            case act.Write(message=pb.ReceiverMessage() as message):
                kind = message.WhichOneof("message")
                if kind in ("go", "skip"):
                    self.answered.append(message.go.n if kind == "go" else message.skip.n)
                    assert self.answered[-1] == len(self.answered) - 1, "answers left the order of n"
                self.to_sender.append(message)
            case act.Post():
                self._hold("receiver", action.n, action.attempt_id)
                self.posting.append(action)
            case act.Accepted() | act.Skipped() | act.Rejected():
                pass
            case _:
                self._do("receiver", action)

    def _do(self, end: str, action: act.Action) -> None:
        match action:
            case act.WantBuffer():
                assert not self.wanting[end]
                self.wanting[end] = not self.is_closed
            case act.ReturnBuffer():
                assert self.granted[end]
                self.granted[end] = False
                self.free[end] += 1
            case act.FreeBuffer():
                del self.held[end][action.key]
                self.quarantined[end].discard(action.key)
                self.free[end] += 1
            case act.Quarantine():
                assert action.key in self.held[end]
                self.quarantined[end].add(action.key)
            case act.Finish():
                assert action.attempt_id not in self.finished[end], "an attempt ended twice"
                self.finished[end][action.attempt_id] = action
                if end == "receiver":
                    self.book.end(action.attempt_id, self.now_s)
            case act.ClosePair():
                self.closed_with = action.error
                self.close()
            case _:
                raise AssertionError(f"{end} must not emit {action}")

    def _hold(self, end: str, key: int, attempt_id: str) -> None:
        assert self.granted[end] and key not in self.held[end]
        self.granted[end] = False
        self.held[end][key] = attempt_id
