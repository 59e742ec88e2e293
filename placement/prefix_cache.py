"""Which blocks hold the KV of which prefix, for requests to come. Knows digests, counts and block ids; knows no tensors.

A tree of *parts*: one for each whole block of tokens, with a KV block for each layer, found by its digest (prefix_keys.py)
below the part before it. What the anchors of `speed` leave beside that (upper KV on a decode worker, states on a prefill worker)
is a part by itself, found by the anchors' own digest. The cache is one owner of each of its blocks (blocks.py): requests share
them, and those that nobody shares are given up, least recently used leaves first, when an allocation needs room.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shoal.errors import InternalError
from shoal.placement.blocks import BlockIds, BlockPool, held


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """What a request would like to find."""

    digests: tuple[bytes, ...]  # of the whole blocks of its tokens, from the first on
    max_tokens: int  # a hit is no longer than this
    anchors: bytes | None = None  # the anchors' digest, where a hit needs their part
    max_without_anchors: int = 0  # how long a hit may be when that part is missing
    windows: tuple[int, ...] = ()  # sliding windows of the model's layers, each once


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What was found. `num_tokens` is a multiple of the block size, or the query's `max_tokens`; then the last block, which goes
    on beyond it, is to be copied rather than shared."""

    num_tokens: int
    blocks: BlockIds  # [layers, whole blocks]: to be shared; NO_BLOCK where a window layer holds nothing, and needs nothing
    tail: BlockIds  # [layers], or empty: to be copied
    anchors: BlockIds  # the anchors' part, or empty: to be copied

    @property
    def sources(self) -> BlockIds:
        """Blocks to be copied, which must stay until they have been."""
        return held(np.concatenate([self.tail, self.anchors]))


@dataclass(slots=True, eq=False)
class _Part:
    digest: bytes
    parent: "_Part | None"
    ids: BlockIds
    num_held: tuple[int, ...] = ()  # by each window's layers: how many of the block's last tokens
    children: set[bytes] = field(default_factory=set)


_COUNTED_AT_ONCE: Final = 64  # parts: an array of each would cost more than what it counts
_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)


class PrefixCache:
    """One per pool. Every method leaves free + cached + used = total."""

    def __init__(self, blocks: BlockPool, block_size: int, evicted: Callable[[int], None] = lambda count: None) -> None:
        """`evicted` is told how many blocks were given up for an allocation."""
        self._evicted = evicted
        self._blocks = blocks
        self._block_size = block_size
        self._parts: OrderedDict[bytes, _Part] = OrderedDict()  # least recently used first; children before their parents
        blocks.serve(self._give_up)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._parts

    def match(self, query: PrefixQuery) -> PrefixHit | None:
        """The longest cached prefix that counts. Whoever uses it retains its blocks before anything else happens."""
        parts = self._chain(query.digests)
        anchors = self._parts.get(query.anchors) if query.anchors is not None else None
        limit = query.max_tokens
        if query.anchors is not None and anchors is None:
            limit = min(limit, query.max_without_anchors // self._block_size * self._block_size)
        num_tokens = self._longest(parts, limit, query.windows)
        if not num_tokens:
            return None
        num_whole, has_tail = divmod(num_tokens, self._block_size)
        used = parts[: num_whole + bool(has_tail)]
        for part in reversed([*([anchors] if anchors is not None else []), *used]):
            self._parts.move_to_end(part.digest)
        shared = [part.ids for part in parts[:num_whole]]
        blocks = np.stack(shared, axis=1) if shared else np.empty((len(parts[0].ids), 0), dtype=np.int32)
        tail = parts[num_whole].ids if has_tail else _NO_BLOCKS
        return PrefixHit(num_tokens, blocks, tail, anchors.ids if anchors is not None else _NO_BLOCKS)

    def publish(self, digests: Sequence[bytes], ids: BlockIds, held_from: Sequence[int] = (), first: int = 0) -> None:
        """Keep whole blocks first … of a sequence whose KV is complete: `ids` [layers, len(digests)], all of its blocks.

        `digests` are of all whole blocks from the sequence's start. `held_from`: for each of its windows, the first token from
        which on that window's layers hold everything. What is cached already stays as it is.
        """
        used = self._chain(digests)
        num_known, size = len(used), self._block_size
        if num_known < min(first, len(digests)):
            return  # what came before has been given up meanwhile
        columns = ids[:, num_known : len(digests)].T.copy()  # the request's table changes as it goes on
        self._blocks.keep(held(columns))
        for index, column in enumerate(columns, num_known):
            stop, parent = (index + 1) * size, used[-1] if used else None
            part = _Part(digests[index], parent, column, tuple(min(size, max(0, stop - at)) for at in held_from))
            self._enter(part)
            used.append(part)
        for part in reversed(used):
            self._parts.move_to_end(part.digest)

    def publish_anchors(self, digest: bytes, ids: BlockIds) -> None:
        """Keep what the anchors leave; harmless when it is kept already."""
        if digest not in self._parts:
            self._blocks.keep(held(ids))
            self._enter(_Part(digest, None, ids.copy()))
        self._parts.move_to_end(digest)

    def discard(self, digests: Iterable[bytes]) -> None:
        """These parts, and all that follow them, are not to be used again: they may be damaged. Harmless for unknown ones."""
        for digest in digests:
            if (part := self._parts.get(digest)) is not None:
                self._let_go(self._leave(part))

    def clear(self) -> None:
        """Give everything up."""
        self.discard(list(self._parts))

    def _chain(self, digests: Sequence[bytes]) -> list[_Part]:
        parts: list[_Part] = []
        for digest in digests:
            part = self._parts.get(digest)
            if part is None:
                break
            parts.append(part)
        return parts

    def _longest(self, parts: list[_Part], limit: int, windows: tuple[int, ...]) -> int:
        """The most tokens, at most `limit`, whose parts are here and of which each window's layers hold the last w − 1."""
        best, runs = 0, [0] * len(windows)  # how many tokens without a gap, up to the end of the part
        for index, part in enumerate(parts):
            num_tokens = min((index + 1) * self._block_size, limit)
            if num_tokens <= index * self._block_size:
                break
            excess = (index + 1) * self._block_size - num_tokens
            for at, num_held in enumerate(part.num_held):
                runs[at] = runs[at] + num_held if num_held == self._block_size else num_held
            if all(run - excess >= min(num_tokens, w - 1) for run, w in zip(runs, windows, strict=True)):
                best = num_tokens
        return best

    def _enter(self, part: _Part) -> None:
        self._parts[part.digest] = part
        if part.parent is not None:
            part.parent.children.add(part.digest)

    def _leave(self, part: _Part) -> list[_Part]:
        """Take a part, and everything below it, out of the tree. Its blocks are still to be let go of."""
        if part.parent is not None:
            part.parent.children.discard(part.digest)
        gone = [part]
        for each in gone:
            gone += [self._parts[digest] for digest in each.children]
            del self._parts[each.digest]
        return gone

    def _let_go(self, parts: Sequence[_Part]) -> None:
        """Blocks that requests share are theirs from now on."""
        if parts:
            self._blocks.let_go(held(np.concatenate([part.ids for part in parts])))

    def _give_up(self, count: int) -> None:
        """Free at least `count` cached blocks: leaves first; then parts whose followers are still shared, which they lose."""
        before, gone, num_freed = self._blocks.num_free, list[_Part](), 0
        for leaves_only in (True, False):
            for part, num_blocks in self._counted():
                if num_freed >= count:
                    break
                if part.digest in self._parts and num_blocks and not (leaves_only and part.children):
                    left = self._leave(part)
                    gone += left
                    num_freed += num_blocks if len(left) == 1 else sum(self._blocks.counts_cached([each.ids for each in left]))
        self._let_go(gone)
        self._evicted(self._blocks.num_free - before)
        if self._blocks.num_free < before + count:
            raise InternalError("the prefix cache holds fewer blocks than the pool says")

    def _counted(self) -> Iterator[tuple[_Part, int]]:
        """Every part, least recently used first, and how many blocks its end would free."""
        parts = list(self._parts.values())
        for start in range(0, len(parts), _COUNTED_AT_ONCE):
            some = parts[start : start + _COUNTED_AT_ONCE]
            yield from zip(some, self._blocks.counts_cached([part.ids for part in some]).tolist(), strict=True)
