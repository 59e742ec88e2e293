"""The prefix cache against a model that knows what every slot holds: hits are right to the slot, no block is lost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.errors import CapacityExceeded, InternalError
from shoal.placement.blocks import NO_BLOCK, BlockIds, BlockPool
from shoal.placement.prefix_cache import PrefixCache, PrefixHit, PrefixQuery
from shoal.placement.prefix_keys import PrefixChain, anchors_digest, prefix_root, prefix_windows
from shoal.placement.tables import BlockTable, KvLayout, RequestTables
from shoal.types import ModelShape
from shoal.visibility import Visibility, VisibilityKind

SIZE, WINDOW, NUM_LAYERS, NUM_BLOCKS = 2, 4, 3, 48
SHAPE = ModelShape(NUM_LAYERS, 8, 2, 1, 4, 16, 10, 100, windows=(None, WINDOW, None))
KINDS = ("full", "speed:2", "speed:2:anchors=0", "speed:2:anchors=3", "pop:2", "pop:2:late", "speed:2:sink")
Slot = tuple[int, int]  # block, offset


@dataclass
class Running:
    """A request, its tokens and where they are."""

    visibility: Visibility
    tokens: tuple[int, ...]
    num_prompt: int
    salt: str
    tables: RequestTables
    num_cached: int

    @property
    def root(self) -> bytes:
        return prefix_root("r", "", self.visibility, NUM_LAYERS, self.salt)


def query_of(visibility: Visibility, prompt: Sequence[int], salt: str) -> PrefixQuery:
    """As a decode worker asks."""
    root, split = prefix_root("r", "", visibility, NUM_LAYERS, salt), visibility.split(len(prompt))
    anchors = anchors_digest(root, prompt[: visibility.anchor_tokens]) if visibility.anchor_tokens else None
    digests = tuple(PrefixChain(root, SIZE, prompt).digests)
    return PrefixQuery(digests, split.num_prefill_tokens, anchors, 0, prefix_windows(SHAPE, visibility))


class Cache(RuleBasedStateMachine):
    """Requests come, share, write, publish, end and fail; others press the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool, SIZE)
        self.running: list[Running] = []
        self.pressure: list[BlockIds] = []
        self.content: dict[Slot, object] = {}

    @rule(
        kind=st.sampled_from(KINDS), boundary=st.integers(1, 4), num_prompt=st.integers(1, 12), num_answer=st.integers(0, 4),
        seed=st.integers(0, 2), salt=st.sampled_from(["", "", "b"]),
    )  # fmt: skip
    def begin(self, kind: str, boundary: int, num_prompt: int, num_answer: int, seed: int, salt: str) -> None:
        visibility = Visibility.parse(f"{kind}:boundary={boundary}").resolve(NUM_LAYERS)
        # one of few long sequences, and a token of its own at its end
        tokens = tuple((seed + (i > 6) * num_answer) % 3 for i in range(num_prompt - 1)) + tuple([seed] * (num_answer + 1))
        layout = KvLayout.of(NUM_LAYERS, visibility, num_prompt)
        hit = self.cache.match(query_of(visibility, tokens[:num_prompt], salt))
        tables = RequestTables(self.pool, SIZE, layout)
        sources = hit.sources if hit is not None else np.empty(0, dtype=np.int32)
        try:
            if hit is not None:
                self.check_hit(hit, visibility, tokens)
                tables.share(hit.blocks)
            self.pool.retain(sources)
            tables.reserve(len(tokens), layout.num_upper_slots(len(tokens)))
        except CapacityExceeded:
            tables.release()
            self.pool.release(sources)
            return
        running = Running(visibility, tokens, num_prompt, salt, tables, hit.num_tokens if hit is not None else 0)
        self.write(running, hit)
        self.pool.release(sources)
        self.running.append(running)

    def check_hit(self, hit: PrefixHit, visibility: Visibility, tokens: Sequence[int]) -> None:
        """Every slot that the design counts is there, and holds these tokens."""
        num_layers = NUM_LAYERS if visibility.kind is not VisibilityKind.SPEED else 2
        c, blocks = hit.num_tokens, hit.blocks
        assert len(blocks) == num_layers and 0 < c <= visibility.split(len(tokens)).num_prompt_tokens
        for layer in range(num_layers):
            window = SHAPE.window(layer)
            for position in range(0 if window is None else max(0, c - (window - 1)), c):
                column, offset = divmod(position, SIZE)
                block = hit.tail[layer] if column == blocks.shape[1] else blocks[layer, column]
                assert self.content[int(block), offset] == self.kv(visibility, layer, tokens, position, is_prefill=True)

    def kv(self, visibility: Visibility, layer: int, tokens: Sequence[int], position: int, *, is_prefill: bool) -> object:
        """What a token leaves at a layer: the same for whoever computes it, but for upper layers."""
        depth = visibility.depth(NUM_LAYERS)
        kind = str(visibility.policy).replace(":late", "") if layer >= depth else str(depth)
        return (layer, kind, is_prefill or layer < depth, tuple(tokens[: position + 1]))

    def write(self, running: Running, hit: PrefixHit | None) -> None:
        """What transfer, first step and later steps write; and before, what is copied."""
        visibility, tables, tokens, c = running.visibility, running.tables, running.tokens, running.num_cached
        layout, split = tables.layout, tables.layout.split
        num_prefill, num_anchors = split.num_prefill_tokens, split.num_anchor_tokens
        if hit is not None and len(hit.tail):
            column, num_lower = c // SIZE, len(tables.lower.layers)
            for layer, block in enumerate(hit.tail):
                table = tables.lower if layer < num_lower else tables.upper
                self.copy(int(block), int(table.layer_ids(layer)[column]))
        if hit is not None and num_anchors:
            sources = hit.anchors.reshape(len(layout.upper_layers), -1)
            for row, layer in enumerate(layout.upper_layers):
                for column in range(-(-min(c, num_anchors) // SIZE)):
                    self.copy(int(sources[row, column]), int(tables.upper.layer_ids(layer)[column]))
            for position in range(min(c, num_anchors)):
                slot = self.slot(tables.upper, 2, position)
                assert self.content[slot] == self.kv(visibility, 2, tokens, position, is_prefill=True)
        shared = set(hit.blocks.reshape(-1).tolist()) if hit is not None else set()
        for position in range(c, len(tokens)):
            is_prefill = position < num_prefill
            for layer in range(NUM_LAYERS):
                is_lower, window = layer in layout.lower_layers, SHAPE.window(layer)
                if is_prefill and not is_lower and visibility.kind is VisibilityKind.SPEED and position >= num_anchors:
                    continue
                if is_prefill and window is not None and position < num_prefill - (window - 1):
                    continue
                table = tables.lower if is_lower else tables.upper
                slot = self.slot(table, layer, position if is_lower else layout.upper_slot(position))
                assert slot[0] not in shared, "a shared block is written"
                self.content[slot] = self.kv(visibility, layer, tokens, position, is_prefill=is_prefill)

    def copy(self, source: int, target: int) -> None:
        for offset in range(SIZE):
            self.content[target, offset] = self.content.get((source, offset))

    def slot(self, table: BlockTable, layer: int, slot: int) -> Slot:
        return int(table.layer_ids(layer)[slot // SIZE]), slot % SIZE

    @precondition(lambda self: self.running)
    @rule(data=st.data(), publishes=st.booleans(), ends=st.booleans())
    def publish_or_end(self, data: st.DataObject, publishes: bool, ends: bool) -> None:
        at = data.draw(st.integers(0, len(self.running) - 1))
        running = self.running[at]
        if publishes:
            self.publish(running)
        if ends:
            self.running.pop(at).tables.release()

    def publish(self, running: Running) -> None:
        tables, split, visibility = running.tables, running.tables.layout.split, running.visibility
        is_pop = visibility.kind is VisibilityKind.POP
        ids = np.concatenate([tables.lower.ids, tables.upper.ids]) if is_pop else tables.lower.ids
        digests = PrefixChain(running.root, SIZE, running.tokens).digests
        digests = digests[: (split.num_prefill_tokens if is_pop else len(running.tokens)) // SIZE]
        if visibility.anchor_tokens:
            if split.num_anchor_tokens < visibility.anchor_tokens:
                return
            columns = tables.upper.ids[:, : -(-split.num_anchor_tokens // SIZE)]
            anchors = running.tokens[: split.num_anchor_tokens]
            self.cache.publish_anchors(anchors_digest(running.root, anchors), columns.reshape(-1))
        held_from = [
            max(running.num_cached, split.num_prefill_tokens - (w - 1)) for w in prefix_windows(SHAPE, running.visibility)
        ]
        self.cache.publish(digests, ids[:, : len(digests)], held_from, running.num_cached // SIZE)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from(self.running))
        digests = PrefixChain(running.root, SIZE, running.tokens).digests
        self.cache.discard(digests)
        assert not any(digest in self.cache for digest in digests)

    @rule(share=st.floats(0, 1))
    def press(self, share: float) -> None:
        self.pressure.append(self.pool.allocate(int(share * self.pool.num_available)))
        for block in self.pressure[-1].tolist():
            for offset in range(SIZE):
                self.content[block, offset] = "junk"

    @precondition(lambda self: self.pressure)
    @rule()
    def relax(self) -> None:
        self.pool.release(self.pressure.pop())

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        held = {block for ids in self.pressure for block in ids.tolist()}
        for running in self.running:
            held |= {*running.tables.lower.ids.flat, *running.tables.upper.ids.flat}
        assert self.pool.num_used == len(held)
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == NUM_BLOCKS

    def teardown(self) -> None:
        for running in self.running:
            running.tables.release()
        for ids in self.pressure:
            self.pool.release(ids)
        assert self.pool.num_used == 0
        self.pool.release(self.pool.allocate(NUM_BLOCKS))  # whatever is cached is given up for it
        assert len(self.cache) == 0 and self.pool.num_free == NUM_BLOCKS


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_hit_is_found_and_its_identity_is_the_designs() -> None:
    pool = BlockPool(40)
    cache = PrefixCache(pool, 4)
    tokens = list(range(10))

    def digests(text: str, salt: str = "", revision: str = "r", adapter: str = "") -> tuple[bytes, ...]:
        root = prefix_root(revision, adapter, Visibility.parse(text).resolve(4), 4, salt)
        return tuple(PrefixChain(root, 4, tokens).digests)

    own = pool.allocate(8).reshape(4, 2)
    cache.publish(digests("full"), own)
    pool.release(own.reshape(-1))
    assert (pool.num_used, pool.num_cached, pool.num_available) == (0, 8, 40)
    for same in ("full", "full:boundary=3", "speed:4", "pop:4:late"):
        hit = cache.match(PrefixQuery(digests(same), 9))
        assert hit is not None and hit.num_tokens == 8 and hit.blocks.tolist() == own.tolist(), same
    assert digests("pop:2") == digests("pop:2:late")
    others = [digests("speed:2"), digests("pop:2"), digests("speed:2:sink"), digests("speed:2:anchors=2"), digests("speed:3")]
    others += [digests("full", salt="other"), digests("full", revision="s"), digests("full", adapter="a")]
    assert len({*others, digests("full")}) == len(others) + 1
    assert all(cache.match(PrefixQuery(other, 9)) is None for other in others)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_what_is_kept_does_not_change_with_the_table_it_came_from(num_layers: int) -> None:
    """A request goes on after it has published, and gives back what sliding windows hide."""
    pool = BlockPool(8)
    cache = PrefixCache(pool, 4)
    chain = PrefixChain(b"root", 4, range(8))
    table, anchors = pool.allocate(2 * num_layers).reshape(num_layers, 2), pool.allocate(1)
    cache.publish(chain.digests, table)
    cache.publish_anchors(b"anchors", anchors)
    own, own_anchors = table.copy(), anchors.copy()
    table[:], anchors[:] = NO_BLOCK, NO_BLOCK
    hit = cache.match(PrefixQuery(tuple(chain.digests), 8, anchors=b"anchors"))
    assert hit is not None and hit.blocks.tolist() == own.tolist() and hit.anchors.tolist() == own_anchors.tolist()
    pool.release(np.concatenate([own.reshape(-1), own_anchors]))
    pool.release(pool.allocate(8))


def test_the_last_block_is_copied_where_it_goes_on_beyond_what_may_be_used() -> None:
    pool = BlockPool(12)
    cache = PrefixCache(pool, 4)
    chain = PrefixChain(b"root", 4, range(12))
    own = pool.allocate(6).reshape(2, 3)
    cache.publish(chain.digests, own)
    hit = cache.match(PrefixQuery(tuple(chain.digests), 10))
    assert hit is not None and hit.num_tokens == 10
    assert hit.blocks.tolist() == own[:, :2].tolist() and hit.sources.tolist() == own[:, 2].tolist()
    assert cache.match(PrefixQuery(tuple(chain.digests), 0)) is None


def test_a_window_counts_only_where_its_last_tokens_are_held_without_a_gap() -> None:
    pool = BlockPool(12)
    cache = PrefixCache(pool, 4)
    chain = PrefixChain(b"root", 4, range(16))

    def found(num_tokens: int, window: int) -> int:
        hit = cache.match(PrefixQuery(tuple(chain.digests), num_tokens, windows=(window,)))
        return 0 if hit is None else hit.num_tokens

    cache.publish(chain.digests[:1], pool.allocate(1).reshape(1, 1), held_from=[0])
    cache.publish(chain.digests, pool.allocate(4).reshape(1, 4), held_from=[6], first=1)  # tokens 4 and 5 are not held
    assert [found(num_tokens, 3) for num_tokens in (3, 4, 7, 8, 9, 15, 16)] == [3, 4, 4, 8, 9, 15, 16]
    assert [found(num_tokens, 4) for num_tokens in (4, 8, 9, 15, 16)] == [4, 4, 9, 15, 16]
    assert [found(num_tokens, 8) for num_tokens in (4, 8, 11, 12, 13, 16)] == [4, 4, 4, 4, 13, 16]
    assert [found(num_tokens, 12) for num_tokens in (4, 12, 16)] == [4, 4, 4]


def test_least_recently_used_leaves_go_first_and_parents_in_use_stay() -> None:
    pool, evicted = BlockPool(8), list[int]()
    cache = PrefixCache(pool, 4, evicted.append)
    chains = [PrefixChain(b"root", 4, [seed] * 8) for seed in range(3)]
    for chain in chains:
        ids = pool.allocate(2).reshape(1, 2)
        cache.publish(chain.digests, ids)
        pool.release(ids.reshape(-1))
    hit = cache.match(PrefixQuery(tuple(chains[0].digests[:1]), 4))
    assert hit is not None
    pool.retain(hit.blocks.reshape(-1))
    pool.release(pool.allocate(4))  # two of them were free
    assert [[digest in cache for digest in chain.digests] for chain in chains] == [[True, False], [True, False], [True, True]]
    assert evicted == [2]
    pool.release(pool.allocate(7))
    assert [digest in cache for digest in chains[0].digests] == [True, False] and pool.num_used == 1
    with pytest.raises(CapacityExceeded, match="8 KV blocks needed, 7 of 8 free"):
        pool.allocate(8)


def test_misuse_is_an_error_of_ours() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(2)
    pool.keep(ids)
    with pytest.raises(InternalError, match="let go of a KV block that it did not keep"):
        pool.let_go(pool.allocate(1))
    pool.release(ids)
    assert pool.num_cached == 2
    with pytest.raises(InternalError, match="no prefix cache"):
        pool.allocate(3)
