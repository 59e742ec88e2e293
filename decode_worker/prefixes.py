"""What a decode worker keeps of prompts and answers for requests to come (design §2, "Cached prefix on the decode side").

A token counts only if decode holds, made as a prefill token, all that it must leave. So `full` keeps whole answers too (K = L: a
decode token's KV is all there is), `speed` keeps lower KV, of decode tokens too, and the anchors' upper KV apart, and `pop` keeps
lower and upper KV of prefill tokens alone. Knows layouts, digests and blocks; knows no transport.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.decode_worker import metrics
from shoal.decode_worker.spec import DecodeSpec
from shoal.engine.holdings import Holding
from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import RequestKv
from shoal.placement.blocks import NO_BLOCK, BlockIds
from shoal.placement.prefix_cache import PrefixCache, PrefixQuery
from shoal.placement.prefix_keys import PrefixChain, anchors_digest, prefix_root, prefix_windows
from shoal.placement.tables import KvLayout
from shoal.types import Fingerprint
from shoal.visibility import VisibilityKind


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """What a prompt's cached prefix is called."""

    chain: PrefixChain  # of its whole blocks
    anchors: bytes | None  # None: there are none, or the prompt is too short for all of them


@dataclass(frozen=True, slots=True)
class MadeFrom:
    """Where what this request got or made begins. Of a transfer, window layers got the last w − 1 tokens alone."""

    num_cached: int
    is_local: bool  # its prefill tokens were run here


class DecodePrefixes:
    """One per worker, beside its pool's cache. Belongs to the event loop."""

    def __init__(self, cache: PrefixCache, pool: KvPool, fingerprint: Fingerprint) -> None:
        self._cache = cache
        self._pool = pool
        self._fingerprint = fingerprint

    def keys(self, spec: DecodeSpec) -> PromptKeys:
        """Of a request's prompt, under its visibility and salt."""
        own, visibility = self._fingerprint, spec.layout.visibility
        root = prefix_root(own.revision, own.adapter, visibility, own.num_layers, spec.cache_salt)
        anchor_ids = spec.prompt_ids[: visibility.anchor_tokens]
        has_all = 0 < visibility.anchor_tokens == len(anchor_ids)
        chain = PrefixChain(root, self._pool.block_size, spec.prompt_ids, spec.images)
        return PromptKeys(chain, anchors_digest(root, anchor_ids, spec.images) if has_all else None)

    def query(self, layout: KvLayout, keys: PromptKeys) -> PrefixQuery | None:
        """What would serve the request; None when nothing can."""
        num_prefill, visibility = layout.split.num_prefill_tokens, layout.visibility
        if not num_prefill or (visibility.anchor_tokens and keys.anchors is None):
            return None
        windows = prefix_windows(self._pool.shape, visibility)
        return PrefixQuery(tuple(keys.chain.digests), num_prefill, keys.anchors, windows=windows)

    def take_in(self, holding: Holding) -> None:
        """Copy what cannot be shared: the last block where it goes on beyond the prefill tokens, and the anchors' upper KV."""
        hit, tables = holding.hit, holding.tables
        split, size = tables.layout.split, self._pool.block_size
        metrics.PREFIX_QUERY_TOKENS.inc(split.num_prefill_tokens)
        if hit is None:
            return
        metrics.PREFIX_HIT_TOKENS.inc(hit.num_tokens)
        if len(hit.tail):
            column, num_lower = hit.blocks.shape[1], len(tables.lower.layers)
            self._pool.copy_blocks(hit.tail[:num_lower], tables.lower.ids[:, column])
            if len(hit.tail) > num_lower:  # `pop`
                self._pool.copy_blocks(hit.tail[num_lower:], tables.upper.ids[:, column])
        if len(hit.anchors):
            num_columns = -(-min(hit.num_tokens, split.num_anchor_tokens) // size)
            sources = hit.anchors.reshape(len(tables.upper.layers), -1)[:, :num_columns]
            self._pool.copy_blocks(sources.reshape(-1), tables.upper.ids[:, :num_columns].reshape(-1))

    def publish(self, keys: PromptKeys, kv: RequestKv, num_run: int, answer_ids: Sequence[int], made_from: MadeFrom) -> None:
        """Keep what one child leaves: `num_run` tokens of its sequence, the prompt and then `answer_ids`, have their KV.

        Nothing is kept before a decode token has run: then the transfer's checksum was right, anchors and projections are done.
        """
        layout, chain = kv.layout, keys.chain
        split, visibility = layout.split, layout.visibility
        if num_run <= split.num_prefill_tokens or kv.lower.num_slots < num_run:
            return
        if visibility.anchor_tokens > split.num_anchor_tokens:
            return  # a prompt too short for all the anchors: the blocks would be of no use
        if answer_ids:
            chain = chain.fork()
            chain.extend(answer_ids)
        is_pop, shape = visibility.kind is VisibilityKind.POP, self._pool.shape
        num_blocks = (split.num_prefill_tokens if is_pop else num_run) // chain.block_size
        if keys.anchors is not None and num_blocks:
            num_columns = -(-split.num_anchor_tokens // chain.block_size)
            self._cache.publish_anchors(keys.anchors, kv.upper.ids[:, :num_columns].reshape(-1))
        ids = np.concatenate([kv.lower.ids[:, :num_blocks], kv.upper.ids[:, :num_blocks]]) if is_pop else kv.lower.ids
        held_from = [self._held_from(w, ids, split.num_prefill_tokens, made_from) for w in prefix_windows(shape, visibility)]
        first = made_from.num_cached // chain.block_size
        self._cache.publish(chain.digests[:num_blocks], ids[:, :num_blocks], held_from, first)

    def _held_from(self, window: int, ids: BlockIds, num_prefill: int, made_from: MadeFrom) -> int:
        """From which token on the layers with this window hold everything: what has been dropped since lies at the front."""
        rows = [layer for layer in range(len(ids)) if self._pool.shape.window(layer) == window]
        num_dropped = int((ids[rows] == NO_BLOCK).sum(axis=1).max(initial=0))
        first = made_from.num_cached if made_from.is_local else max(made_from.num_cached, num_prefill - (window - 1))
        return max(first, num_dropped * self._pool.block_size)

    def discard(self, keys: PromptKeys) -> None:
        """What this prompt begins with may be damaged: never use it, nor anything that follows it, again."""
        self._cache.discard(keys.chain.digests[:1])
        if keys.anchors is not None:
            self._cache.discard([keys.anchors])
