import pytest
import torch

from shoal.engine.kv_pool import KvPool
from shoal.engine.state_store import StateStore, num_state_blocks, state_range
from shoal.placement.blocks import BlockPool
from shoal.placement.plan import make_plan
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility

SHAPE = ModelShape(4, 24, 4, 2, 8, 128, 256, 512)  # a block of 4 tokens has 128 elements: states do not divide it


@pytest.mark.parametrize("block_size", [1, 4, 16])  # a state larger than a block, and several to a block
def test_states_come_back_however_they_are_cut(block_size: int) -> None:
    pool, blocks = KvPool(SHAPE, 64, block_size, DType.FLOAT32), BlockPool(64)
    other = blocks.allocate(2)
    positions = range(5, 18)
    ids = blocks.allocate(num_state_blocks(len(positions), SHAPE.hidden_size, pool.data[0].numel()))
    store = StateStore(pool, ids[::-1].copy(), positions, SHAPE.hidden_size)
    states = torch.randn(len(positions), SHAPE.hidden_size)
    for start, stop in [(9, 18), (5, 6), (6, 9)]:
        store.write(start, states[start - 5 : stop - 5])
    for start, stop in [(5, 18), (7, 8), (10, 15), (6, 6)]:
        assert torch.equal(store.read(start, stop), states[start - 5 : stop - 5])
    out = torch.empty(3 * SHAPE.hidden_size)
    store.read_into(8, 11, out)
    assert torch.equal(out, states[3:6].reshape(-1))
    assert not pool.data[torch.from_numpy(other).long()].any()  # nobody else's block was touched
    with pytest.raises(ValueError, match="outside"):
        store.read(4, 6)
    with pytest.raises(ValueError, match="cannot hold"):
        StateStore(pool, ids[:-1], positions, SHAPE.hidden_size)


@pytest.mark.parametrize(
    ("text", "expected"), [("speed:2:anchors=3", range(3)), ("pop:2:late", range(19)), ("pop:2", range(0)), ("full", range(0))]
)
def test_which_states_a_plan_ships(text: str, expected: range) -> None:
    plan = make_plan(SHAPE, DType.FLOAT32, Visibility.parse(text).resolve(4), 20, 0, max_entry_bytes=1 << 20, max_entry_tokens=7)
    assert state_range(plan) == expected
