"""Blocks and tables: free + owned = total whatever is done, all or nothing, slots where design §2 puts them."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.errors import CapacityExceeded, InternalError
from shoal.placement.blocks import NO_BLOCK, BlockIds, BlockPool
from shoal.placement.tables import BlockTable, KvLayout, RequestTables
from shoal.visibility import Visibility

NUM_BLOCKS = 40


class Pool(RuleBasedStateMachine):
    """Random allocate, retain and release against a plain count of owners per block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[BlockIds] = []  # one per owner

    def owners(self) -> Counter[int]:
        return Counter(int(block) for ids in self.held for block in ids)

    @rule(count=st.integers(0, NUM_BLOCKS + 5))
    def allocate(self, count: int) -> None:
        free, before = self.pool.num_free, self.owners()
        if count > free:
            with pytest.raises(CapacityExceeded, match=f"{count} KV blocks needed, {free} of {NUM_BLOCKS} free"):
                self.pool.allocate(count)
            assert self.pool.num_free == free
            return
        ids = self.pool.allocate(count)
        assert len(set(ids.tolist())) == count and not set(ids.tolist()) & set(before)
        self.held.append(ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        ids = data.draw(st.sampled_from(self.held))
        shared = ids[: data.draw(st.integers(0, len(ids)))]
        self.pool.retain(shared)
        self.held.append(shared)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def misuse_changes_nothing(self, data: st.DataObject) -> None:
        free_block = data.draw(st.sampled_from(sorted(set(range(NUM_BLOCKS)) - set(self.owners()))))
        ids = np.array([free_block], dtype=np.int32)
        before = self.pool.num_free
        with pytest.raises(InternalError, match="released a free KV block"):
            self.pool.release(ids)
        with pytest.raises(InternalError, match="retained a free KV block"):
            self.pool.retain(ids)
        with pytest.raises(InternalError, match=r"asked for -1 KV blocks"):
            self.pool.allocate(-1)
        for odd in (-1, NUM_BLOCKS):
            with pytest.raises(InternalError, match="released a KV block that does not exist"):
                self.pool.release(np.array([odd], dtype=np.int32))
        assert self.pool.num_free == before

    @precondition(lambda self: any(len(ids) for ids in self.held))
    @rule()
    def naming_a_block_twice_changes_nothing(self) -> None:
        block, before = next(ids[0] for ids in self.held if len(ids)), self.pool.num_free
        for change in (self.pool.release, self.pool.retain):
            with pytest.raises(InternalError, match="a KV block twice in one call"):
                change(np.array([block, block], dtype=np.int32))
        assert self.pool.num_free == before

    @invariant()
    def free_plus_owned_is_total(self) -> None:
        self.pool.check()
        assert self.pool.num_used == len(self.owners())
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks


class Tables(RuleBasedStateMachine):
    """Requests of mixed visibility reserve, grow and release in one pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(120)
        self.requests: list[RequestTables] = []

    @rule(text=st.sampled_from(["full", "speed:1", "speed:3:anchors=5", "pop:2", "speed:4"]), num_prompt=st.integers(1, 20))
    def add(self, text: str, num_prompt: int) -> None:
        layout = KvLayout.of(4, Visibility.parse(text).resolve(4), num_prompt)
        self.requests.append(RequestTables(self.pool, 4, layout))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_lower=st.integers(0, 40), num_upper=st.integers(0, 40))
    def reserve(self, data: st.DataObject, num_lower: int, num_upper: int) -> None:
        tables = data.draw(st.sampled_from(self.requests))
        before = (self.pool.num_free, tables.lower.num_slots, tables.upper.num_slots)
        try:
            tables.reserve(num_lower, num_upper)
        except CapacityExceeded:
            assert (self.pool.num_free, tables.lower.num_slots, tables.upper.num_slots) == before
        else:
            assert tables.lower.num_slots >= num_lower
            assert not tables.layout.upper_layers or tables.upper.num_slots >= num_upper

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), forget=st.booleans())
    def release(self, data: st.DataObject, forget: bool) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        tables = self.requests.pop(index) if forget else self.requests[index]
        tables.release()
        tables.release()  # harmless
        assert tables.lower.num_slots == tables.upper.num_slots == 0

    @invariant()
    def every_block_has_one_place(self) -> None:
        self.pool.check()
        blocks = [int(b) for tables in self.requests for table in (tables.lower, tables.upper) for b in table.ids.reshape(-1)]
        assert len(set(blocks)) == len(blocks) == self.pool.num_used


for _machine in (Pool, Tables):
    _machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPool = Pool.TestCase
TestTables = Tables.TestCase


def test_layout_puts_speed_densely_above() -> None:
    layout = KvLayout.of(6, Visibility.parse("speed:4:anchors=2:boundary=3").resolve(6), 10)  # P = 7
    assert layout.lower_layers == range(4) and layout.upper_layers == range(4, 6)
    assert [layout.upper_slot(position) for position in (0, 1, 7, 8, 9, 10)] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(InternalError, match="position 4 is not visible"):
        layout.upper_slot(4)
    assert layout.num_upper_slots(10) == 5 and layout.num_upper_slots(12) == 7


def test_layout_of_pop_and_full() -> None:
    pop = KvLayout.of(6, Visibility.parse("pop:4").resolve(6), 10)
    assert pop.upper_slot(4) == 4 and pop.num_upper_slots(12) == 12
    full = KvLayout.of(6, Visibility.parse("pop:6").resolve(6), 10)
    assert full.lower_layers == range(6) and not full.upper_layers and full.num_upper_slots(12) == 0


def test_layout_with_more_anchors_than_prefill_tokens() -> None:
    layout = KvLayout.of(6, Visibility.parse("speed:4:anchors=99:boundary=3").resolve(6), 10)
    assert [layout.upper_slot(position) for position in range(12)] == list(range(12))
    short = KvLayout.of(6, Visibility.parse("speed:4:boundary=12").resolve(6), 10)  # P = 0: nothing is skipped
    assert [layout.upper_slot(position) for position in range(10)] == list(range(10)) and short.num_upper_slots(10) == 10


def test_table_keeps_blocks_in_slot_order_per_layer() -> None:
    table = BlockTable(range(2, 5), 4)
    assert table.num_missing_blocks(9) == 9 and table.num_missing_blocks(0) == 0
    table.extend(np.arange(6, dtype=np.int32))
    table.extend(np.array([10, 11, 12], dtype=np.int32))
    assert table.num_slots == 12 and table.num_missing_blocks(13) == 3
    assert [table.layer_ids(layer).tolist() for layer in (2, 3, 4)] == [[0, 1, 10], [2, 3, 11], [4, 5, 12]]


def test_what_a_window_hides_goes_back() -> None:
    """Window layers keep the blocks that a later query sees; forks and shared prefixes give theirs back once."""
    pool, windows = BlockPool(200), (None, 6, 6, None)
    tables = RequestTables(pool, 4, KvLayout.of(4, Visibility.parse("pop:2:boundary=1"), 30))
    tables.reserve(34, 34)
    twin = tables.fork(34, 34)
    full = pool.num_used
    assert tables.drop_hidden(windows, 5) == 0
    assert tables.drop_hidden(windows, 29) == 2 * 6  # slots below 24: six blocks in each of two layers
    assert (tables.lower.ids[1, :6] == NO_BLOCK).all() and (tables.upper.ids[0, :6] == NO_BLOCK).all()
    assert (tables.lower.ids[0] != NO_BLOCK).all() and (tables.lower.ids[1, 6:] != NO_BLOCK).all()
    assert pool.num_used == full  # the twin still sees them
    assert tables.drop_hidden(windows, 29) == 0 and twin.drop_hidden(windows, 33) == 2 * 7
    assert pool.num_used < full
    pool.check()
    for own in (tables, twin):
        own.release()
    pool.check()
    assert pool.num_free == 200


@pytest.mark.parametrize(("text", "num_dropped"), [("full", 12), ("speed:2", 6), ("pop:2:late", 6)])
def test_upper_tables_keep_what_is_dense_or_yet_to_be_projected(text: str, num_dropped: int) -> None:
    pool = BlockPool(200)
    visibility = Visibility.parse(f"{text}:boundary=1").resolve(4)
    tables = RequestTables(pool, 4, KvLayout.of(4, visibility, 30))
    tables.reserve(30, tables.layout.num_upper_slots(30))
    assert tables.drop_hidden((None, 6, 6, None), 29) == num_dropped
    tables.release()
    assert pool.num_free == 200
