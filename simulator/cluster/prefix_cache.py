"""What a simulated worker would find, and keeps, in placement's own prefix cache. Knows a trace's hashes instead of tokens.

A trace names blocks of some hundred tokens (Mooncake: 512) by a hash that stands for everything before as well; each is taken as
that many of the worker's blocks. What decode workers generate has no hashes and is not kept.
"""

import numpy as np

from shoal.placement.prefix_cache import PrefixCache, PrefixQuery
from shoal.placement.prefix_keys import prefix_windows
from shoal.placement.tables import RequestTables
from shoal.simulator.cluster.job import Job
from shoal.types import ModelShape
from shoal.visibility import Visibility, VisibilityKind


def digests(job: Job, num_tokens: int, block_size: int) -> tuple[bytes, ...]:
    """One for each whole block among the first `num_tokens` tokens that the hashes cover."""
    covered = min(num_tokens, len(job.prefix_hashes) * job.hash_tokens) // block_size
    per_hash = job.hash_tokens // block_size
    return tuple(b"%d.%d" % (job.prefix_hashes[index // per_hash], index % per_hash) for index in range(covered))


def query(job: Job, shape: ModelShape, visibility: Visibility, block_size: int, *, of_prefill: bool) -> PrefixQuery | None:
    """What would serve the job's prompt on a worker; None when nothing can.

    A prefill worker that ships hidden states of all tokens (late `pop`) would have to keep them: it finds nothing.
    """
    split = job.split
    if not job.prefix_hashes or job.hash_tokens % block_size or (of_prefill and visibility.late):
        return None
    needs_anchors = bool(visibility.anchor_tokens) and not of_prefill
    if not split.num_prefill_tokens or (needs_anchors and split.num_anchor_tokens < visibility.anchor_tokens):
        return None
    found = digests(job, split.num_prompt_tokens, block_size)
    anchors = b"anchors of " + found[0] if needs_anchors and found else None
    limit = split.num_prefill_tokens - 1 if of_prefill else split.num_prefill_tokens  # a prefill worker runs one token at least
    return PrefixQuery(found, limit, anchors, windows=prefix_windows(shape, visibility))


def publish(
    cache: PrefixCache, tables: RequestTables, job: Job, shape: ModelShape, num_held: int, num_cached: int, *, of_prefill: bool
) -> None:
    """Keep the whole blocks of a prompt whose first `num_held` tokens have all their KV here."""
    layout = tables.layout
    split, visibility = layout.split, layout.visibility
    size = tables.lower.block_size
    is_pop = visibility.kind is VisibilityKind.POP and tables.upper.ids.size > 0
    known = digests(job, min(num_held, split.num_prefill_tokens) if is_pop else num_held, size)
    if not known or job.hash_tokens % size or split.num_anchor_tokens < visibility.anchor_tokens:
        return
    if visibility.anchor_tokens and not of_prefill:
        columns = tables.upper.ids[:, : -(-split.num_anchor_tokens // size)]
        cache.publish_anchors(b"anchors of " + known[0], columns.reshape(-1))
    ids = np.concatenate([tables.lower.ids[:, : len(known)], tables.upper.ids[:, : len(known)]]) if is_pop else tables.lower.ids
    held_from = [max(num_cached, split.num_prefill_tokens - (w - 1)) for w in prefix_windows(shape, visibility)]
    cache.publish(known, ids[:, : len(known)], held_from, num_cached // size)
