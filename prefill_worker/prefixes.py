"""What a prefill worker keeps of prompts for prompts to come (design §2, "Cached prefix on the prefill side").

It saves computing alone: what decode lacks is sent from what is kept. A token whose deep state is due counts only if that state
was kept: the anchors' are, those of late `pop` are not, so late `pop` gains only where decode holds the tokens too.
"""

from dataclasses import dataclass

import numpy as np

from shoal.engine.holdings import Holding
from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import RequestKv
from shoal.engine.state_store import StateStore
from shoal.placement.prefix_cache import PrefixCache, PrefixQuery
from shoal.placement.prefix_keys import PrefixChain, anchors_digest, prefix_root
from shoal.prefill_worker import metrics
from shoal.prefill_worker.spec import PrefillSpec
from shoal.visibility import VisibilityKind


@dataclass(frozen=True, slots=True)
class PrefillKeys:
    """What a prompt's cached prefix is called here."""

    chain: PrefixChain  # of the prefill tokens' whole blocks
    anchors: bytes | None  # None: there are none, or too few tokens for all of them


class PrefillPrefixes:
    """One per worker, beside its pool's cache. Belongs to the event loop."""

    def __init__(self, cache: PrefixCache, pool: KvPool) -> None:
        self._cache = cache
        self._pool = pool

    def keys(self, spec: PrefillSpec) -> PrefillKeys:
        """Of a task's tokens, under its visibility and salt."""
        own, visibility = spec.handle.fingerprint, spec.layout.visibility
        salt = spec.cache_salt + (
            "|late" if visibility.late else ""
        )  # late tasks leave no upper KV, so they share with their like
        root = prefix_root(own.revision, own.adapter, visibility, own.num_layers, salt)
        spans = [image.span for image in spec.images]
        chain = PrefixChain(root, self._pool.block_size, spec.token_ids, spans)
        anchor_ids = spec.token_ids[: visibility.anchor_tokens]
        has_all = 0 < visibility.anchor_tokens == len(anchor_ids)
        return PrefillKeys(chain, anchors_digest(root, anchor_ids, spans) if has_all else None)

    def query(self, spec: PrefillSpec, keys: PrefillKeys) -> PrefixQuery | None:
        """What would serve the task: whole blocks, so that at least its last token is run."""
        size, num_cached = self._pool.block_size, spec.handle.num_cached_tokens  # c
        limit, at_decode = (len(spec.token_ids) - 1) // size * size, num_cached // size * size
        digests = tuple(keys.chain.digests)
        if spec.layout.visibility.late or (spec.num_due_anchors and keys.anchors is None):
            return PrefixQuery(digests, min(limit, at_decode))
        return PrefixQuery(digests, limit, keys.anchors if spec.num_due_anchors else None, at_decode)

    def take_in(self, spec: PrefillSpec, holding: Holding, states: StateStore | None) -> None:
        """Copy the anchors' states that are due and need not be made again."""
        hit, num_anchors = holding.hit, spec.layout.split.num_anchor_tokens
        metrics.PREFIX_QUERY_TOKENS.inc(len(spec.token_ids))
        metrics.PREFIX_HIT_TOKENS.inc(holding.num_cached_tokens)
        if hit is None or states is None or not len(hit.anchors):
            return
        kept = StateStore(self._pool, hit.anchors, range(num_anchors), self._pool.shape.hidden_size)
        start, stop = states.positions.start, min(hit.num_tokens, num_anchors)
        if start < stop:
            states.write(start, kept.read(start, stop))

    def publish(self, spec: PrefillSpec, keys: PrefillKeys, kv: RequestKv, states: StateStore | None) -> None:
        """Keep what a task has computed, all of its tokens."""
        layout, chain = kv.layout, keys.chain
        ids = kv.lower.ids
        if layout.visibility.kind is VisibilityKind.POP and not layout.visibility.late:
            ids = np.concatenate([ids, kv.upper.ids])
        if keys.anchors is not None and states is not None and states.positions == range(layout.split.num_anchor_tokens):
            self._cache.publish_anchors(keys.anchors, states.block_ids)
        self._cache.publish(chain.digests, ids[:, : len(chain.digests)])
