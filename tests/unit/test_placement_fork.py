"""Several answers to one prompt share its whole blocks: free + owned = total whatever is forked and released, in any order."""

import random

import numpy as np
import pytest

from shoal.engine.holdings import HoldingQueue, HoldingSize
from shoal.errors import CapacityExceeded
from shoal.placement.blocks import BlockPool
from shoal.placement.reservation import decode_reservation, largest_max_tokens
from shoal.placement.tables import KvLayout, RequestTables, num_fork_blocks
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility

SHAPE = ModelShape(4, 64, 4, 2, 16, 128, 256, 512)
TEXTS = ("full:boundary=1", "speed:2:boundary=3", "speed:1:anchors=9:boundary=1", "pop:2:boundary=1", "pop:3:late:boundary=2")


def tables_of(pool: BlockPool, text: str, num_prompt: int, num_tokens: int, block_size: int = 4) -> RequestTables:
    layout = KvLayout.of(4, Visibility.parse(text), num_prompt)
    tables = RequestTables(pool, block_size, layout)
    tables.reserve(num_prompt + num_tokens - 1, layout.num_upper_slots(num_prompt + num_tokens - 1))
    return tables


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 16, 23])
def test_a_fork_shares_whole_blocks_and_owns_the_rest(text: str, num_prompt: int) -> None:
    pool = BlockPool(400)
    tables = tables_of(pool, text, num_prompt, 6)
    used = pool.num_used
    slots = num_prompt + 9
    fork = tables.fork(slots, tables.layout.num_upper_slots(slots))
    assert pool.num_used - used == sum(num_fork_blocks(tables.layout, 4, slots, tables.layout.num_upper_slots(slots)))
    for mine, theirs, num_slots in (
        (tables.lower, fork.lower, num_prompt),
        (tables.upper, fork.upper, tables.layout.num_upper_slots(num_prompt)),
    ):
        whole = num_slots // 4
        assert np.array_equal(mine.ids[:, :whole], theirs.ids[:, :whole])
        assert not set(mine.ids[:, whole:].flat) & set(theirs.ids[:, whole:].flat)
    assert fork.lower.num_slots >= slots
    mine, theirs = tables.partial_blocks(), fork.partial_blocks()
    assert len(mine) == len(theirs) and not set(mine) & set(theirs)
    assert bool(len(mine)) == bool(num_prompt % 4 or tables.layout.num_upper_slots(num_prompt) % 4)
    tables.release()  # the first may end before the others
    pool.check()
    assert set(fork.lower.ids.flat) | set(fork.upper.ids.flat) and pool.num_used == fork.lower.ids.size + fork.upper.ids.size
    fork.release()
    fork.release()
    pool.check()
    assert pool.num_used == 0


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(40)
    tables = tables_of(pool, "full:boundary=1", 13, 8)
    used = pool.num_used
    with pytest.raises(CapacityExceeded):
        tables.fork(13 + 40, 0)
    pool.check()
    assert pool.num_used == used
    tables.release()
    assert pool.num_used == 0


@pytest.mark.parametrize("seed", range(5))
async def test_holdings_add_up_under_random_answers_and_ends(seed: int) -> None:
    rng = random.Random(seed)
    blocks = BlockPool(300)
    queue = HoldingQueue(blocks, 4, max_holders=8, max_queued=0)
    held = []
    num_refused = num_partly = 0
    for _ in range(300):
        if rng.random() < 0.5:
            num_prompt, further = rng.randint(1, 30), [rng.randint(1, 20) for _ in range(rng.randrange(5))]
            visibility = Visibility.parse(rng.choice(TEXTS))
            size = decode_reservation(SHAPE, DType.FLOAT32, 4, visibility, num_prompt, 8, further_answers=further)
            layout = KvLayout.of(4, visibility, num_prompt)
            needed = HoldingSize(size.num_lower_slots, size.num_upper_slots, rng.randrange(2), size.forks)
            free = blocks.num_free
            try:
                held.append(await queue.reserve(layout, needed))
            except CapacityExceeded:
                num_refused += 1
                assert blocks.num_free == free
            else:
                assert free - blocks.num_free == queue.num_blocks(layout, needed) == size.num_blocks + needed.num_state_blocks
        elif held and rng.random() < 0.5:
            holding = rng.choice(held)
            queue.release_answer(holding, rng.randrange(len(holding.answers)))
            num_partly += 1
        elif held:
            queue.release(held.pop(rng.randrange(len(held))))
        queue.check()
    for holding in held:
        queue.release(holding)
    queue.check()
    assert blocks.num_used == 0 and num_refused > 3 and num_partly > 20


@pytest.mark.parametrize("text", TEXTS)
def test_the_advice_for_several_answers_is_the_most_that_fits(text: str) -> None:
    visibility = Visibility.parse(text)

    def num_blocks(max_tokens: int) -> int:
        further = [max_tokens] * 2
        return decode_reservation(SHAPE, DType.FLOAT32, 4, visibility, 10, max_tokens, further_answers=further).num_blocks

    most = largest_max_tokens(SHAPE, 4, visibility, 10, 100, num_answers=3)
    assert num_blocks(most) <= 100 < num_blocks(most + 1)
