"""Who holds a simulated worker's blocks, first come, first served. Blocks and sizes are placement's own code; knows no steps.

The rule is the live worker's: at most `max_running` requests hold blocks, `max_queued` more wait, and nobody is passed by.
"""

from collections import deque
from dataclasses import dataclass, field

from shoal.errors import CapacityExceeded, InternalError
from shoal.placement.blocks import BlockIds, BlockPool
from shoal.placement.reservation import ReservationSize, check_fits_ever
from shoal.placement.tables import KvLayout, RequestTables
from shoal.simulator.cluster.job import Job


@dataclass(slots=True)
class Holding:
    """One request's blocks on one worker."""

    tables: RequestTables
    state_blocks: BlockIds


@dataclass(slots=True)
class Holders:
    """Hands out the blocks of one worker, and keeps the time integral of what is held."""

    blocks: BlockPool
    block_size: int
    state_bytes_per_block: float
    max_running: int
    max_queued: int
    block_seconds: float = 0.0
    peak_blocks: int = 0
    _holdings: dict[str, Holding] = field(default_factory=dict)
    _waiting: deque[tuple[Job, KvLayout, ReservationSize]] = field(default_factory=deque)
    _since_s: float = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def reserve(self, job: Job, layout: KvLayout, size: ReservationSize, now: float) -> bool:
        """True: the blocks are taken. False: the job waits and `release` will name it.

        Raises InvalidRequest when the whole pool would not do, CapacityExceeded when too many wait.
        """
        check_fits_ever(size, self.blocks.num_blocks)
        if not self._waiting and self._fits(size):
            self._take(job, layout, size, now)
            return True
        if len(self._waiting) >= self.max_queued:
            raise CapacityExceeded(f"{size.num_blocks} KV blocks needed, {len(self._waiting)} requests wait already; retry later")
        self._waiting.append((job, layout, size))
        return False

    def release_states(self, job: Job, now: float) -> list[Job]:
        """Give the blocks of deep states back; names the jobs whose turn has come."""
        holding = self._holdings[job.key]
        if not len(holding.state_blocks):
            return []
        self._account(now)
        ids, holding.state_blocks = holding.state_blocks, holding.state_blocks[:0]
        self.blocks.release(ids)
        return self._admit(now)

    def release(self, job: Job, now: float) -> list[Job]:
        """Give all blocks of a job back; names the jobs whose turn has come."""
        self._account(now)
        holding = self._holdings.pop(job.key)
        self.blocks.release(holding.state_blocks)
        holding.tables.release()
        return self._admit(now)

    def check_idle(self) -> None:
        """Raise InternalError unless every block is free and nobody waits: the state when all requests have ended."""
        if self._holdings or self._waiting or self.blocks.num_used:
            raise InternalError(f"{len(self._holdings)} requests hold and {len(self._waiting)} wait, and all have ended")

    def _admit(self, now: float) -> list[Job]:
        admitted = []
        while self._waiting and self._fits(self._waiting[0][2]):
            job, layout, size = self._waiting.popleft()
            self._take(job, layout, size, now)
            admitted.append(job)
        return admitted

    def _fits(self, size: ReservationSize) -> bool:
        return len(self._holdings) < self.max_running and size.num_blocks + self._state_blocks(size) <= self.blocks.num_free

    def _state_blocks(self, size: ReservationSize) -> int:
        return int(-(-size.num_deep_state_bytes // self.state_bytes_per_block)) if size.num_deep_state_bytes else 0

    def _take(self, job: Job, layout: KvLayout, size: ReservationSize, now: float) -> None:
        self._account(now)
        tables = RequestTables(self.blocks, self.block_size, layout)
        tables.reserve(size.num_lower_slots, size.num_upper_slots)
        self._holdings[job.key] = Holding(tables, self.blocks.allocate(self._state_blocks(size)))
        self.peak_blocks = max(self.peak_blocks, self.blocks.num_used)

    def _account(self, now: float) -> None:
        self.block_seconds += self.blocks.num_used * (now - self._since_s)
        self._since_s = now
