import asyncio
import random

import pytest

from shoal.engine.holdings import GROUPS, Holding, HoldingQueue, HoldingSize
from shoal.errors import CapacityExceeded, InvalidRequest
from shoal.placement.blocks import BlockPool
from shoal.placement.tables import KvLayout
from shoal.types import Priority, Turn
from shoal.visibility import Visibility

LAYOUT = KvLayout.of(4, Visibility.parse("speed:2:boundary=1"), 16)
SMALL, LARGE = HoldingSize(4, 4), HoldingSize(16, 4, num_state_blocks=1)  # 4 and 11 blocks of 4 tokens


def queue(num_blocks: int, *, max_holders: int = 100, max_queued: int = 100) -> HoldingQueue:
    return HoldingQueue(BlockPool(num_blocks), 4, max_holders=max_holders, max_queued=max_queued)


async def test_waiters_are_served_in_order_and_one_that_fits_may_pass_one_that_does_not() -> None:
    holdings = queue(12)
    first = await holdings.reserve(LAYOUT, LARGE)
    second = asyncio.create_task(holdings.reserve(LAYOUT, LARGE))
    third = asyncio.create_task(holdings.reserve(LAYOUT, SMALL))
    await asyncio.sleep(0)
    assert {group: holdings.num_blocks_of(group) for group in GROUPS} == {"lower": 8, "upper": 2, "deep_states": 1}
    assert holdings.num_waiting == 2 and holdings.waiters.waiting()[Priority.NORMAL] == (2, 15)
    holdings.release_states(first)
    holdings.release(first)
    holdings.release(await second)
    holdings.release(await third)

    first = await holdings.reserve(LAYOUT, SMALL)
    large = asyncio.create_task(holdings.reserve(LAYOUT, LARGE))
    await asyncio.sleep(0)
    small = await asyncio.wait_for(holdings.reserve(LAYOUT, SMALL), 1)  # fits beside the first, and the large one does not
    assert not large.done()
    holdings.release(first)
    await asyncio.sleep(0)
    assert not large.done()
    holdings.release(small)
    holdings.release(await large)
    holdings.check()


async def test_higher_classes_wait_less() -> None:
    holdings = queue(12)
    first = await holdings.reserve(LAYOUT, LARGE)
    order: list[str] = []

    async def wait(name: str, priority: Priority) -> Holding:
        holding = await holdings.reserve(LAYOUT, LARGE, Turn(priority))
        order.append(name)
        return holding

    low = asyncio.create_task(wait("low", Priority.LOW))
    normal = asyncio.create_task(wait("normal", Priority.NORMAL))
    high = asyncio.create_task(wait("high", Priority.HIGH))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [] and holdings.num_waiting == 3
    holdings.release(first)
    holdings.release(first)  # harmless
    taken = await high
    assert not normal.done() and holdings.blocks.num_used == 11
    holdings.release_states(taken)
    holdings.release_states(taken)
    assert holdings.blocks.num_used == 10
    holdings.release(taken)
    holdings.release(await normal)
    holdings.release(await low)
    assert order == ["high", "normal", "low"]
    holdings.check()


async def test_how_long_blocks_are_held_is_known_before_any_come_back() -> None:
    now = [100.0]
    holdings = HoldingQueue(BlockPool(12), 4, max_holders=9, max_queued=9, clock=lambda: now[0])
    assert holdings.mean_hold_s == 0
    first = await holdings.reserve(LAYOUT, SMALL)
    now[0] = 104.0
    second = await holdings.reserve(LAYOUT, SMALL)
    assert holdings.mean_hold_s == 2.0
    holdings.release(first)
    assert holdings.mean_hold_s == 4.0
    now[0] = 110.0
    assert holdings.mean_hold_s == 6.0
    holdings.release(second)
    assert holdings.mean_hold_s == pytest.approx(4.2)


async def test_a_waiter_that_leaves_holds_nobody_up() -> None:
    holdings = queue(12)
    first = await holdings.reserve(LAYOUT, SMALL)
    large = asyncio.create_task(holdings.reserve(LAYOUT, LARGE))
    small = asyncio.create_task(holdings.reserve(LAYOUT, SMALL))
    await asyncio.sleep(0)
    large.cancel()
    holdings.release(await asyncio.wait_for(small, 1))
    holdings.release(first)
    holdings.check()


async def test_a_turn_given_to_one_who_leaves_at_that_moment_is_given_back() -> None:
    holdings = queue(12)
    first = await holdings.reserve(LAYOUT, LARGE)
    waiter = asyncio.create_task(holdings.reserve(LAYOUT, LARGE))
    await asyncio.sleep(0)
    holdings.release(first)  # the waiter's future is set ...
    waiter.cancel()  # ... and it is cancelled before it runs
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert holdings.num_holders == 0
    holdings.check()


async def test_limits() -> None:
    holdings = queue(12, max_queued=1)
    with pytest.raises(InvalidRequest, match="12 in all"):
        await holdings.reserve(LAYOUT, HoldingSize(40, 4))
    first = await holdings.reserve(LAYOUT, LARGE)
    waiter = asyncio.create_task(holdings.reserve(LAYOUT, LARGE))
    await asyncio.sleep(0)
    with pytest.raises(CapacityExceeded, match="retry later") as refused:
        await holdings.reserve(LAYOUT, SMALL)
    assert refused.value.retry_after_s == 1.0
    holdings.release(first)
    holdings.release(await waiter)

    few = queue(1000, max_holders=1)
    only = await few.reserve(LAYOUT, SMALL)
    other = asyncio.create_task(few.reserve(LAYOUT, SMALL))
    await asyncio.sleep(0)
    assert few.num_waiting == 1
    few.release(only)
    few.release(await other)


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_whoever_leaves_when(seed: int) -> None:
    rng = random.Random(seed)
    holdings = queue(24, max_holders=3)

    async def live() -> None:
        holding = await holdings.reserve(LAYOUT, rng.choice([SMALL, LARGE]))
        try:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                holdings.release_states(holding)
        finally:
            holdings.release(holding)

    tasks = [asyncio.create_task(live()) for _ in range(40)]
    for task in tasks:
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        holdings.blocks.check()
        if rng.random() < 0.4:
            task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert holdings.num_holders == 0 and holdings.num_waiting == 0
    holdings.check()
