"""One worker as the router holds it: who it is, its channel, what it owes. Knows protos; opens no connection by itself."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import grpc

from shoal.config.logs import log_event
from shoal.errors import Unavailable
from shoal.pb.internal.v1 import worker_pb2, worker_pb2_grpc
from shoal.pb.v1 import shoal_pb2
from shoal.placement.balance import WorkerLoadView
from shoal.router.breaker import Breaker, BreakerState
from shoal.router.calls import WorkerCalls
from shoal.router.instruments import BREAKER_STATE, BREAKER_TRANSITIONS
from shoal.rpc.fingerprints import fingerprint_from_pb
from shoal.types import Priority
from shoal.visibility import Visibility

PREFILL, DECODE = "prefill", "decode"
_BREAKER_LEVELS: Final = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}
_PRIORITIES: Final = {"": Priority.NORMAL, **{str(priority): priority for priority in Priority}}
_log = logging.getLogger(__name__)


class Sent:
    """What was sent to a worker and is in none of its reports yet, summed by priority."""

    def __init__(self) -> None:
        self._each: deque[tuple[Priority, int]] = deque()
        self.sums: dict[Priority, tuple[int, int]] = {}  # how many, and what they need together

    def __len__(self) -> int:
        return len(self._each)

    def add(self, priority: Priority, need: int) -> None:
        """One more."""
        self._each.append((priority, need))
        self._count(priority, 1, need)

    def drop(self, num_oldest: int) -> None:
        """A report holds these."""
        for _ in range(min(num_oldest, len(self._each))):
            priority, need = self._each.popleft()
            self._count(priority, -1, -need)

    def _count(self, priority: Priority, num: int, need: int) -> None:
        old_num, old_need = self.sums.get(priority, (0, 0))
        if old_num + num:
            self.sums[priority] = old_num + num, old_need + need
        else:
            del self.sums[priority]


class Worker:
    """One incarnation (id and epoch) of a worker. Its channel is closed when the last holder lets go after it was retired."""

    def __init__(self, description: worker_pb2.WorkerDescription, channel: grpc.aio.Channel) -> None:
        self.worker_id = description.worker_id
        self.pool = description.pool
        self.epoch = description.epoch
        self.address = description.address
        self.fingerprint = fingerprint_from_pb(description.fingerprint)
        self.allowed = frozenset(Visibility.parse(text).policy for text in description.allowed_visibilities)
        self.max_boundary_tokens = description.max_boundary_tokens
        self.is_colocated = description.colocated
        self.state = "starting"
        self.answers = True  # its last report came in time
        self.channel = channel
        make_stub: Callable[[grpc.aio.Channel], Any] = (
            worker_pb2_grpc.DecodeWorkerStub if self.pool == DECODE else worker_pb2_grpc.PrefillWorkerStub
        )
        self.stub = make_stub(channel)
        self.calls = WorkerCalls(self.pool, self.worker_id, channel, self.stub)
        self.own_token_layers = 0  # sent by this router and not yet done
        self.foreign_token_layers = 0  # reported by the worker beyond that: other routers' requests
        self.load = shoal_pb2.WorkerLoad()  # as last reported; of it by class, so that requests need not translate it:
        self.waiting: tuple[tuple[Priority, int, int], ...] = ()  # requests, and the blocks that they need
        self.outstanding: tuple[tuple[Priority, int], ...] = ()  # token-layers
        self.sent = Sent()  # by this router since: what each needs (blocks, or token-layers of prefill)
        self._breaker = Breaker()
        BREAKER_STATE.labels(self.worker_id, self.pool).set(0)
        self._on_lost: set[Callable[[Unavailable], None]] = set()
        self._lost: Unavailable | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.worker_id, self.epoch

    @property
    def num_holders(self) -> int:
        """Attempts that run on this worker."""
        return len(self._on_lost)

    def view(self, held_token_layers: int = 0) -> WorkerLoadView:
        """What placement needs to know. `held_token_layers`: what it probably need not run of the request at hand."""
        return WorkerLoadView(
            worker_id=self.worker_id,
            fingerprint=self.fingerprint,
            allowed=self.allowed,
            max_boundary_tokens=self.max_boundary_tokens,
            outstanding_token_layers=self.own_token_layers + self.foreign_token_layers,
            is_ready=self.state == "ready",
            is_tripped=not self._breaker.allows(time.monotonic()),
            held_token_layers=held_token_layers,
            is_colocated=self.is_colocated,
        )

    @property
    def is_leaving(self) -> bool:
        """Whether it was told to go, in order: what it gives up is handed over, not failed."""
        return self.state in ("draining", "gone") and self._lost is None

    def reported(self, load: shoal_pb2.WorkerLoad, num_sent: int) -> None:
        """Take a worker's own report, asked for when `sent` was so long.

        What it holds beyond this router's requests is other routers' work.
        """
        self.answers = True
        self.calls.open_session()
        self.load = load
        classes = [(_PRIORITIES[own.priority], own) for own in load.classes if own.priority in _PRIORITIES]
        self.waiting = tuple((priority, own.num_waiting_reqs, own.num_waiting_blocks) for priority, own in classes)
        self.outstanding = tuple((priority, own.outstanding_token_layers) for priority, own in classes)
        self.sent.drop(num_sent)
        self.foreign_token_layers = max(0, load.outstanding_token_layers - self.own_token_layers)

    @property
    def breaker_state(self) -> BreakerState:
        return self._breaker.state

    def begin(self) -> float:
        """An attempt is sent. Whatever its end, `judge` is told, with the moment that this returns."""
        now = time.monotonic()
        self._note(lambda: self._breaker.begin(now))
        return now

    def judge(self, verdict: bool | None, begun_at: float) -> None:
        """An attempt has ended: well, by a fault of this worker (False), or in a way that proves nothing (None)."""
        if verdict is None:
            self._note(self._breaker.give_up)
        else:
            self._note(self._breaker.succeed if verdict else lambda: self._breaker.fail(time.monotonic(), begun_at))

    def prove(self) -> None:
        """Tokens have come: the request that tries a half-open breaker need not end first."""
        if self._breaker.state is BreakerState.HALF_OPEN:
            self._note(self._breaker.succeed)

    def _note(self, happens: Callable[[], None]) -> None:
        before = self._breaker.state
        happens()
        if (now := self._breaker.state) is not before:
            BREAKER_STATE.labels(self.worker_id, self.pool).set(_BREAKER_LEVELS[now])
            BREAKER_TRANSITIONS.labels(self.worker_id, self.pool, now).inc()
            log_event(
                _log, logging.WARNING if now is BreakerState.OPEN else logging.INFO, "breaker", worker=self.worker_id,
                leg=self.pool, epoch=self.epoch, state=now, before=before, opens_for_s=self._breaker.waits_s(time.monotonic()),
            )  # fmt: skip

    def hold(self, on_lost: Callable[[Unavailable], None]) -> None:
        """Be told when the worker is declared dead, at once if it already is."""
        self._on_lost.add(on_lost)
        if self._lost is not None:
            on_lost(self._lost)

    def release(self, on_lost: Callable[[Unavailable], None]) -> None:
        self._on_lost.discard(on_lost)

    async def close(self) -> None:
        """Once nobody holds it."""
        await self.calls.close()
        await self.channel.close(None)

    def lose(self, reason: str) -> None:
        """The worker is dead: end what runs on it now rather than when its connection notices."""
        if self._lost is None:
            self.state = "dead"
            self._lost = Unavailable(f"{self.pool} worker {self.worker_id} {reason}; retry the request")
            for on_lost in list(self._on_lost):
                on_lost(self._lost)
