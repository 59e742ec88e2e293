"""Who holds a simulated worker's blocks, and who waits for them. Blocks and turns are placement's own code; knows no steps.

As in the live worker at most `max_running` requests hold blocks and `max_queued` more wait; who is next, `FairQueue` says.
"""

from dataclasses import dataclass, field

from shoal.errors import CapacityExceeded, InternalError
from shoal.placement.blocks import BlockIds, BlockPool
from shoal.placement.fair_queue import FairQueue
from shoal.placement.preemption import headroom_blocks
from shoal.placement.prefix_cache import PrefixCache, PrefixHit, PrefixQuery
from shoal.placement.rates import HoldTimes
from shoal.placement.reservation import ReservationSize, check_fits_ever
from shoal.placement.tables import KvLayout, RequestTables
from shoal.simulator.cluster.job import Job
from shoal.types import USUAL_TURN


@dataclass(slots=True)
class Holding:
    """One request's blocks on one worker."""

    job: Job
    tables: RequestTables
    state_blocks: BlockIds
    since_s: float
    num_cached_tokens: int = 0  # of the prompt, shared with the prefix cache from the start


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job would take."""

    layout: KvLayout
    size: ReservationSize
    query: PrefixQuery | None = None
    resumes: bool = False  # goes on with what had begun: ahead of its line


@dataclass(slots=True)
class Holders:
    """Hands out the blocks of one worker, and keeps the time integral of what is held."""

    blocks: BlockPool
    block_size: int
    state_bytes_per_block: float
    max_running: int
    max_queued: int
    cache: PrefixCache | None = None
    num_layers_to_grow: int = 0  # preemption: each that runs may need one more block in so many layers
    is_closed: bool = False  # nobody is let in
    block_seconds: float = 0.0
    peak_blocks: int = 0
    _holdings: dict[str, Holding] = field(default_factory=dict)
    _waiting: FairQueue[Job] = field(default_factory=FairQueue)
    _wanted: dict[Job, Wanted] = field(default_factory=dict)  # of those that wait
    _since_s: float = 0.0
    _hold_times: HoldTimes = field(default_factory=HoldTimes)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def reserve(self, job: Job, wanted: Wanted, now: float) -> bool:
        """True: the blocks are taken. False: the job waits and `release` will name it.

        Raises InvalidRequest when the whole pool would not do, CapacityExceeded when too many wait.
        """
        size = wanted.size
        check_fits_ever(size, self.blocks.num_blocks)
        if not len(self._waiting) and self._fits(wanted):
            self._take(job, wanted, now)
            return True
        if len(self._waiting) >= self.max_queued:
            raise CapacityExceeded(f"{size.num_blocks} KV blocks needed, {len(self._waiting)} requests wait already; retry later")
        self._waiting.push(job, USUAL_TURN, size.num_blocks + self._state_blocks(size), resumes=wanted.resumes)
        if self._waiting.pop(lambda waiter: waiter is job and self._fits(wanted)) is not None:  # those before it do not fit
            self._take(job, wanted, now)
            return True
        self._wanted[job] = wanted
        return False

    def num_cached_tokens(self, job: Job) -> int:
        """How much of a holding job's prompt was here before it."""
        return self._holdings[job.key].num_cached_tokens

    @property
    def jobs(self) -> list[Job]:
        """Who holds blocks."""
        return [holding.job for holding in self._holdings.values()]

    def tables(self, job: Job) -> RequestTables:
        """Where a holding job's KV is."""
        return self._holdings[job.key].tables

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
        self._hold_times.ended(now - holding.since_s)
        return self._admit(now)

    def open(self, now: float) -> list[Job]:
        """Let jobs in again; names those whose turn has come."""
        self.is_closed = False
        return self._admit(now)

    def grow(self, job: Job, num_tokens: int, now: float) -> bool:
        """Room for so many tokens of a holding job; False, and nothing changes, when blocks are short."""
        self._account(now)
        tables = self._holdings[job.key].tables
        try:
            tables.reserve(num_tokens, tables.layout.num_upper_slots(num_tokens))
        except CapacityExceeded:
            return False
        self.peak_blocks = max(self.peak_blocks, self.blocks.num_used)
        return True

    def num_steps_left(self, job: Job, num_tokens: int) -> int:
        """How many tokens beyond `num_tokens` a holding job may come to know before it must grow."""
        tables = self._holdings[job.key].tables
        room = tables.lower.num_slots - num_tokens
        if tables.layout.upper_layers:
            room = min(room, tables.upper.num_slots - tables.layout.num_upper_slots(num_tokens))
        return room

    def cancel(self, job: Job, now: float) -> list[Job]:
        """Take a job out, holding or waiting; names the jobs whose turn has come. Harmless when it is not here."""
        if job.key in self._holdings:
            return self.release(job, now)
        self._waiting.discard(job)
        self._wanted.pop(job, None)
        return self._admit(now)

    def clear(self, now: float) -> None:
        """The worker has died: nothing is held and nobody waits."""
        self._account(now)
        self._waiting, self._wanted = FairQueue(), {}
        if self.cache is not None:
            self.cache.clear()
        for holding in self._holdings.values():
            self.blocks.release(holding.state_blocks)
            holding.tables.release()
        self._holdings.clear()

    @property
    def num_holders(self) -> int:
        return len(self._holdings)

    @property
    def waiting(self) -> tuple[int, int]:
        """(Jobs that wait, blocks that they need)."""
        return self._waiting.waiting()[USUAL_TURN.priority]

    def mean_hold_s(self, now: float) -> float:
        """How long jobs hold their blocks."""
        return self._hold_times.mean_s(now, [holding.since_s for holding in self._holdings.values()])

    @property
    def reserved_share(self) -> float:
        """Of all blocks."""
        return self.blocks.num_used / self.blocks.num_blocks

    def check_idle(self) -> None:
        """Raise InternalError unless every block is free and nobody waits: the state when all requests have ended."""
        if self._holdings or len(self._waiting) or self.blocks.num_used:
            raise InternalError(f"{len(self._holdings)} requests hold and {len(self._waiting)} wait, and all have ended")

    def _admit(self, now: float) -> list[Job]:
        admitted: list[Job] = []
        while len(self._waiting) and len(self._holdings) < self.max_running:
            job = self._waiting.pop(lambda waiter: self._fits(self._wanted[waiter]))
            if job is None:
                break
            self._take(job, self._wanted.pop(job), now)
            admitted.append(job)
        return admitted

    def _fits(self, wanted: Wanted) -> bool:
        if self.is_closed or len(self._holdings) >= self.max_running:
            return False
        return self._has_room(wanted.size, self._match(wanted)) or self._has_room(wanted.size, None)

    def _match(self, wanted: Wanted) -> PrefixHit | None:
        return None if self.cache is None or wanted.query is None else self.cache.match(wanted.query)

    def _has_room(self, size: ReservationSize, hit: PrefixHit | None) -> bool:
        """As the live worker counts: what is shared needs no room, and nothing that is shared or to be copied may be given up."""
        needed = size.num_blocks + self._state_blocks(size) + headroom_blocks(len(self._holdings), self.num_layers_to_grow)
        if hit is None:
            return needed <= self.blocks.num_available
        shared, cached = hit.blocks.reshape(-1), self.blocks.count_cached
        return needed - len(shared) <= self.blocks.num_available - cached(shared) - cached(hit.sources)

    def _state_blocks(self, size: ReservationSize) -> int:
        return int(-(-size.num_deep_state_bytes // self.state_bytes_per_block)) if size.num_deep_state_bytes else 0

    def _take(self, job: Job, wanted: Wanted, now: float) -> None:
        self._account(now)
        size, hit = wanted.size, self._match(wanted)
        if hit is not None and not self._has_room(size, hit):
            hit = None
        tables = RequestTables(self.blocks, self.block_size, wanted.layout)
        if hit is not None:
            tables.share(hit.blocks)
        tables.reserve(size.num_lower_slots, size.num_upper_slots)
        states = self.blocks.allocate(self._state_blocks(size))
        self._holdings[job.key] = Holding(job, tables, states, now, 0 if hit is None else hit.num_tokens)
        self.peak_blocks = max(self.peak_blocks, self.blocks.num_used)

    def _account(self, now: float) -> None:
        self.block_seconds += self.blocks.num_used * (now - self._since_s)
        self._since_s = now
