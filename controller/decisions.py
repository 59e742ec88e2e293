"""What autoscaling decided, kept for whoever asks. Knows words and numbers; decides nothing."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from shoal.config.worker import Pool
from shoal.pb.internal.v1 import controller_pb2
from shoal.placement.autoscale import Need

_MOST_UNREAD = 1000  # of one watcher, which then loses the oldest


@dataclass(frozen=True, slots=True)
class Decision:
    """One look at one pool. `because` are words of docs/autoscaling.md."""

    unix_s: float
    pool: Pool
    decision: str  # grow, shrink, hold
    because: tuple[str, ...]
    num_workers: int
    need: Need
    num_wanted: int
    bounds: tuple[int, int]
    seen: Mapping[str, float] = field(default_factory=dict)
    is_dry_run: bool = False
    message: str = ""

    def to_pb(self) -> controller_pb2.ScalingDecision:
        return controller_pb2.ScalingDecision(
            unix_s=self.unix_s,
            pool=self.pool,
            decision=self.decision,
            because=self.because,
            num_workers=self.num_workers,
            num_needed=self.need.num_workers,
            num_wanted=self.num_wanted,
            min_workers=self.bounds[0],
            max_workers=self.bounds[1],
            needed_for_work=self.need.for_work,
            needed_for_wait=self.need.for_wait,
            needed_for_room=self.need.for_room,
            seen=self.seen,
            dry_run=self.is_dry_run,
            message=self.message,
        )


class DecisionBoard:
    """The latest decision of each pool, and each new one for those who watch."""

    def __init__(self) -> None:
        self._latest: dict[Pool, Decision] = {}
        self._watchers: set[asyncio.Queue[Decision]] = set()

    def put(self, decision: Decision) -> bool:
        """Note a decision; whether it does anything else than the one before."""
        before = self._latest.get(decision.pool)
        self._latest[decision.pool] = decision
        for watcher in self._watchers:
            if watcher.full():
                watcher.get_nowait()
            watcher.put_nowait(decision)
        return before is None or _gist(before) != _gist(decision)

    async def watch(self, *, follow: bool) -> AsyncIterator[Decision]:
        """The latest of each pool, then, with `follow`, each as it comes. Without any yet: the first one."""
        queue: asyncio.Queue[Decision] = asyncio.Queue(_MOST_UNREAD)
        self._watchers.add(queue)
        try:
            latest = list(self._latest.values())
            for decision in latest:
                yield decision
            while follow or not latest:
                latest = [await queue.get()]
                yield latest[0]
        finally:
            self._watchers.discard(queue)


def _gist(decision: Decision) -> tuple[object, ...]:
    return decision.decision, decision.num_workers, decision.num_wanted, decision.message
