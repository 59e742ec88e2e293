"""Who may hold KV blocks, and who waits for them. Knows counts and block tables; knows no tensors and no transfer.

Who is next is placement's to say (`placement/fair_queue.py`); nobody starves. All methods belong to one event loop. Blocks come
back by one path, `release`, which lets the next waiters in.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from shoal.errors import CapacityExceeded, InternalError, InvalidRequest
from shoal.placement.blocks import BlockIds, BlockPool, held
from shoal.placement.fair_queue import FairQueue
from shoal.placement.preemption import headroom_blocks
from shoal.placement.prefix_cache import PrefixCache, PrefixHit, PrefixQuery
from shoal.placement.rates import HoldTimes
from shoal.placement.tables import KvLayout, RequestTables, num_fork_blocks
from shoal.types import USUAL_TURN, Turn


@dataclass(frozen=True, slots=True)
class HoldingSize:
    """What one request needs: slots of both tables, blocks for parked deep states, and slots of each further answer (n > 1)."""

    num_lower_slots: int
    num_upper_slots: int
    num_state_blocks: int = 0
    forks: tuple[tuple[int, int], ...] = ()


class Holding:
    """One request's blocks: its tables and the blocks of its deep states. Made by `HoldingQueue.reserve` only."""

    def __init__(self, answers: tuple[RequestTables, ...], state_blocks: BlockIds, hit: PrefixHit | None = None) -> None:
        self.answers = answers  # one for each answer; the first holds the prompt, the others share its whole blocks
        self.state_blocks = state_blocks
        self.hit = hit  # the cached prefix that the tables begin with
        self.sources = _NO_BLOCKS if hit is None else hit.sources  # cached blocks yet to be copied from
        self.released = False

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, held from the start."""
        return 0 if self.hit is None else self.hit.num_tokens

    @property
    def tables(self) -> RequestTables:
        """Where the prompt is."""
        return self.answers[0]


@dataclass(slots=True, eq=False)
class _Waiter:
    layout: KvLayout
    size: HoldingSize
    query: PrefixQuery | None
    future: asyncio.Future[Holding]


GROUPS: Final = ("lower", "upper", "deep_states")  # what blocks are for: a table of layers, or hidden states that wait

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)


class HoldingQueue:
    """Hands out blocks to at most `max_holders` requests; `max_queued` more may wait."""

    def __init__(
        self,
        blocks: BlockPool,
        block_size: int,
        *,
        max_holders: int,
        max_queued: int,
        cache: PrefixCache | None = None,
        num_layers_to_grow: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_layers_to_grow`: holders may come to need more than they reserved, a block in each of so many layers."""
        self.blocks = blocks
        self._num_layers_to_grow = num_layers_to_grow
        self._is_closed = False
        self._cache = cache
        self.waiters: FairQueue[_Waiter] = FairQueue()  # what each costs is its blocks
        self.hold_times = HoldTimes()
        self._block_size = block_size
        self.max_holders = max_holders
        self._max_queued = max_queued
        self._clock = clock
        self._since: dict[Holding, float] = {}
        self.num_released = 0  # requests so far

    @property
    def num_holders(self) -> int:
        return len(self._since)

    @property
    def num_waiting(self) -> int:
        return len(self.waiters)

    def num_blocks_of(self, group: str) -> int:
        """Blocks in holders' tables of one group of GROUPS; one that several share counts for each. From any thread."""
        holders = list(self._since)
        if group == "deep_states":
            return sum(len(holding.state_blocks) for holding in holders)
        return sum(held(getattr(tables, group).ids).size for holding in holders for tables in holding.answers)

    @property
    def mean_hold_s(self) -> float:
        """How long requests hold their blocks, by those that ended lately and those that hold now."""
        return self.hold_times.mean_s(self._clock(), self._since.values())

    def num_blocks(self, layout: KvLayout, size: HoldingSize) -> int:
        """Blocks that a request of this size takes."""
        lower, upper = -(-size.num_lower_slots // self._block_size), -(-size.num_upper_slots // self._block_size)
        forks = sum(sum(num_fork_blocks(layout, self._block_size, *fork)) for fork in size.forks)
        return len(layout.lower_layers) * lower + len(layout.upper_layers) * upper + size.num_state_blocks + forks

    async def reserve(
        self,
        layout: KvLayout,
        size: HoldingSize,
        turn: Turn = USUAL_TURN,
        query: PrefixQuery | None = None,
        *,
        resumes: bool = False,
    ) -> Holding:
        """Wait for the request's turn and take its blocks, all or nothing; what `query` finds of it by then is shared.

        Raises InvalidRequest when the whole pool would not do, CapacityExceeded when the waiting line is full.
        """
        needed = self.num_blocks(layout, size)
        if needed > self.blocks.num_blocks:
            raise InvalidRequest(
                f"the request needs {needed} KV blocks, this worker has {self.blocks.num_blocks} in all;"
                " shorten the prompt or lower max_tokens"
            )
        waiter = _Waiter(layout, size, query, asyncio.get_running_loop().create_future())
        if not len(self.waiters) and self._fits(waiter):
            return self._take(waiter)
        if len(self.waiters) >= self._max_queued:
            raise CapacityExceeded(
                f"{needed} KV blocks needed, {self.blocks.num_available} of {self.blocks.num_blocks} free,"
                f" {len(self.waiters)} requests wait already; retry later",
                max(1.0, self.mean_hold_s * len(self.waiters) / self.max_holders),
            )
        self.waiters.push(waiter, turn, needed, resumes=resumes)
        self._admit()  # it may fit where those before it do not
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                self.release(waiter.future.result())  # the turn came and the waiter left in the same moment
            else:
                self.waiters.discard(waiter)
                self._admit()  # it may have kept others from their turn
            raise

    def release(self, holding: Holding) -> None:
        """Give every block of a request back. Harmless when repeated."""
        if holding.released:
            return
        holding.released = True
        self.release_sources(holding)
        self.release_states(holding)
        for tables in holding.answers:
            tables.release()
        self.num_released += 1
        self.hold_times.ended(self._clock() - self._since.pop(holding))
        self._admit()

    def release_answer(self, holding: Holding, index: int) -> None:
        """Give one answer's blocks back while others go on; blocks it shares stay. Harmless when repeated."""
        holding.answers[index].release()
        self._admit()

    def drop_hidden(self, tables: RequestTables, windows: Sequence[int | None], position: int) -> int:
        """Give back what no query at `position` or later sees (RequestTables.drop_hidden): the waiters may have it."""
        num_dropped = tables.drop_hidden(windows, position)
        if num_dropped:
            self._admit()
        return num_dropped

    def release_sources(self, holding: Holding) -> None:
        """What was to be copied out of the cache has been. Harmless when repeated."""
        ids, holding.sources = holding.sources, _NO_BLOCKS
        self.blocks.release(ids)

    def trim_states(self, holding: Holding, num_blocks: int) -> None:
        """Fewer deep states come than were provided for: give the blocks beyond `num_blocks` back."""
        ids, holding.state_blocks = holding.state_blocks[num_blocks:], holding.state_blocks[:num_blocks]
        self.blocks.release(ids)
        if len(ids):
            self._admit()

    def release_states(self, holding: Holding) -> None:
        """Give the blocks of the deep states back, once nothing reads them any more. Harmless when repeated."""
        ids, holding.state_blocks = holding.state_blocks, holding.state_blocks[:0]
        self.blocks.release(ids)
        if len(ids):
            self._admit()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Nobody is let in meanwhile, whatever comes free."""
        self._is_closed = True
        try:
            yield
        finally:
            self._is_closed = False
            self._admit()

    def check(self) -> None:
        """Raise InternalError unless free + owned = total, and all is free when nobody holds."""
        self.blocks.check()
        if not self._since and self.blocks.num_used:
            raise InternalError(f"{self.blocks.num_used} KV blocks are owned and nobody holds them")

    def _fits(self, waiter: _Waiter) -> bool:
        if self._is_closed:
            return False
        return len(self._since) < self.max_holders and (
            self._has_room(waiter, self._match(waiter)) or self._has_room(waiter, None)
        )

    def _match(self, waiter: _Waiter) -> PrefixHit | None:
        return None if self._cache is None or waiter.query is None else self._cache.match(waiter.query)

    def _has_room(self, waiter: _Waiter, hit: PrefixHit | None) -> bool:
        """Whether there is room, sharing what was found. Without a hit all that is cached may be given up for it."""
        blocks, headroom = self.blocks, headroom_blocks(len(self._since), self._num_layers_to_grow)
        needed = self.num_blocks(waiter.layout, waiter.size) + headroom
        if hit is None:
            return needed <= blocks.num_available
        shared = hit.blocks.reshape(-1)
        return needed - len(shared) <= blocks.num_available - blocks.count_cached(held(shared)) - blocks.count_cached(hit.sources)

    def _take(self, waiter: _Waiter) -> Holding:
        hit, size = self._match(waiter), waiter.size
        if hit is not None and not self._has_room(waiter, hit):
            hit = None
        tables = RequestTables(self.blocks, self._block_size, waiter.layout)
        if hit is not None:
            tables.share(hit.blocks)
            self.blocks.retain(hit.sources)
        tables.reserve(size.num_lower_slots, size.num_upper_slots)
        forks = (tables.fork(*fork) for fork in size.forks)
        holding = Holding((tables, *forks), self.blocks.allocate(size.num_state_blocks), hit)
        self._since[holding] = self._clock()
        return holding

    def _admit(self) -> None:
        while len(self._since) < self.max_holders and (waiter := self.waiters.pop(self._fits)) is not None:
            if not waiter.future.done():  # else it is leaving at this moment
                waiter.future.set_result(self._take(waiter))
