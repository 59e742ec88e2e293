"""Replaces workers while requests run, never below the pool's size unless told. Knows the order of steps, no process.

Successors get free slots, so old and new have different ids and each pair of workers stays what it was until one of them drains.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from shoal.config.worker import Pool
from shoal.controller.keeper import SlotKeeper, WorkerGivenUp
from shoal.controller.pools import Pools

Warm = Callable[[Sequence[SlotKeeper]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RollingRestart:
    """`surge` workers at a time, one pool after the other. With no surge each is drained before its successor starts."""

    pools: tuple[Pool, ...]
    surge: int
    drain_s: float

    async def run(self, pools: Pools, warm: Warm) -> None:
        """`warm` waits until workers take traffic and their pairs are made. Raises WorkerGivenUp: what is left stays as it is."""
        step = max(1, self.surge)
        for pool in self.pools:
            old = pools.keepers(pool)
            for batch in (old[at : at + step] for at in range(0, len(old), step)):
                batch = [keeper for keeper in batch if keeper in pools.keepers(pool)]  # the others were given up meanwhile
                if self.surge:
                    await _fill(pools, pool, len(batch), warm)
                for keeper in batch:
                    pools.retire(keeper, self.drain_s)
                await pools.emptied(batch)
                if not self.surge:
                    await _fill(pools, pool, len(batch), warm)


async def _fill(pools: Pools, pool: Pool, count: int, warm: Warm) -> None:
    new = [pools.add(pool) for _ in range(count)]
    try:
        await warm(new)
    except WorkerGivenUp:
        for keeper in new:
            if keeper in pools.keepers(pool):
                pools.retire(keeper, 0.0)  # no more workers than there should be
        raise
