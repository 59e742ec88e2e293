"""OrderedGloo: Gloo with NCCL's strictness, for tests. Knows the order both ends issue in; fails where NCCL would hang.

Every receive leaves a note in the pair's store when it is posted; every send reads the note of the same rank in the order of
issue. A missing note means that the send was issued before its receive; another number or size, that the two ends disagree.
"""

import threading
from collections.abc import Callable

import torch

from shoal.errors import InternalError, Unavailable
from shoal.kv_transfer.channel import PairChannel, Pending
from shoal.kv_transfer.gloo import GlooChannel
from shoal.kv_transfer.rendezvous import PairStore


class OneAtATime:
    """Counts what is outstanding on one worker over all its pairs, as one GPU would allow. Thread-safe."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._num_outstanding = 0

    def enter(self) -> None:
        """Raises InternalError when another one is outstanding."""
        with self._lock:
            if self._num_outstanding:
                raise InternalError(f"a second {self._what} was issued on this worker: on a GPU it would occupy or deadlock it")
            self._num_outstanding += 1

    def leave(self) -> None:
        with self._lock:
            self._num_outstanding -= 1


class OrderedGlooChannel(PairChannel):
    """A Gloo pair that checks what NCCL would take for granted. `receives` and `sends` are shared by a worker's pairs."""

    def __init__(self, store: PairStore, rank: int, host: str, timeout_s: float, receives: OneAtATime, sends: OneAtATime) -> None:
        self._store = store
        self._inner = GlooChannel(store, rank, host, timeout_s)
        self._receives = receives
        self._sends = sends
        self._num_received = 0
        self._num_sent = 0
        self._outstanding: set[_Counted] = set()
        self._lock = threading.Lock()
        self._aborted = False

    def post_recv(self, n: int, buffer: torch.Tensor) -> Pending:
        counted = self._enter(self._receives, lambda: self._inner.post_recv(n, buffer))
        key, note = f"posted/{self._num_received}", f"{n}:{buffer.numel()}"
        self._store.set(key, note)
        self._store.delete_key(key)  # the peer has it, and every Go comes behind it
        self._num_received += 1
        return counted

    def send(self, n: int, buffer: torch.Tensor) -> Pending:
        key, mine = f"posted/{self._num_sent}", f"{n}:{buffer.numel()}"
        theirs = self._take_note(key)
        if theirs is None:
            raise InternalError(f"send {n} was issued before its receive was posted")
        if theirs != mine:
            raise InternalError(f"order broken: the peer posted message:bytes {theirs}, this end sends {mine}")
        self._num_sent += 1
        return self._enter(self._sends, lambda: self._inner.send(n, buffer))

    def abort(self) -> None:
        """As NCCL's: what was outstanding no longer occupies the worker."""
        self._inner.abort()
        with self._lock:
            self._aborted = True
        for counted in list(self._outstanding):
            counted.leave()

    def close(self) -> None:
        self._inner.close()

    def _take_note(self, key: str) -> str | None:
        """The peer's note, if it is there."""
        note = self._store.get(key).decode() if self._store.check([key]) else None
        self._store.delete_key(key)
        return note

    def _enter(self, gate: OneAtATime, issue: Callable[[], Pending]) -> "_Counted":
        with self._lock:
            if self._aborted:
                raise Unavailable("the pair has been aborted")
            gate.enter()
            try:
                return _Counted(issue(), gate, self._outstanding)
            except Unavailable:
                gate.leave()
                raise


class _Counted:
    """A pending message that occupies its worker until it returns or its pair is aborted."""

    def __init__(self, inner: Pending, gate: OneAtATime, outstanding: "set[_Counted]") -> None:
        self._inner = inner
        self._gate = gate
        self._outstanding = outstanding
        self._lock = threading.Lock()
        outstanding.add(self)

    def wait(self, timeout_s: float) -> int:
        try:
            return self._inner.wait(timeout_s)
        finally:
            self.leave()

    def leave(self) -> None:
        with self._lock:
            if self in self._outstanding:
                self._outstanding.discard(self)
                self._gate.leave()
