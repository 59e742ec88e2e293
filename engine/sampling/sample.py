"""Picks one token per row of logits: arg-max of edited, filtered scores plus noise (design §2). Knows no requests.

The noise is a hash of (seed, child, position, vocabulary id): the same request draws the same tokens in any batch, on any worker,
and again when it is resumed.
"""

from collections.abc import Sequence

import torch

from shoal.engine.sampling.edit import edited
from shoal.engine.sampling.filter import filtered
from shoal.engine.sampling.logprobs import score
from shoal.engine.sampling.noise import gumbel
from shoal.engine.sampling.rows import Sampled, SampleRow
from shoal.errors import InternalError
from shoal.types import TokenLogprobs


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Draw one token per row of `logits` [rows, vocab] float32, which is left as it is."""
    if len(logits) != len(rows):
        raise InternalError(f"{len(rows)} rows to sample, {len(logits)} rows of logits")
    if not rows:
        return []
    scores = edited(logits, rows)
    drawn = scores.argmax(-1)
    random = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if random:
        chosen = [rows[index] for index in random]
        index = torch.tensor(random, device=logits.device)
        drawn[index] = _draw(filtered(scores[index], [row.params for row in chosen]), chosen)
    token_ids = drawn.tolist()
    logprobs = _logprobs(logits, token_ids, rows)
    sound = (logits.amax(-1).isfinite() & scores.amax(-1).isfinite()).tolist()  # a NaN anywhere is the largest
    return [Sampled(token_id, logprobs.get(index), sound[index]) for index, token_id in enumerate(token_ids)]


def _draw(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The best of score plus noise [rows]. Where filters have left few tokens, noise is made for those alone."""
    vocab_size = scores.shape[1]
    counts = (scores > float("-inf")).sum(-1)
    is_few = (counts <= vocab_size // 16).tolist()
    drawn = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    for few in (True, False):
        own = [index for index, value in enumerate(is_few) if value is few]
        if not own:
            continue
        index = torch.tensor(own, device=scores.device)
        values, ids = scores[index], torch.arange(vocab_size, device=scores.device)[None]
        if few:
            values, ids = values.topk(max(1, int(counts[index].max())), dim=-1)
        best = (values + gumbel([rows[at] for at in own], ids)).argmax(-1, keepdim=True)
        drawn[index] = ids.expand(len(own), -1).gather(1, best)[:, 0]
    return drawn


def _logprobs(logits: torch.Tensor, token_ids: list[int], rows: Sequence[SampleRow]) -> dict[int, TokenLogprobs]:
    """By row, for those that asked."""
    asked = [index for index, row in enumerate(rows) if row.params.num_logprobs is not None]
    if not asked:
        return {}
    wanted = logits if len(asked) == len(rows) else logits[torch.tensor(asked, device=logits.device)]
    num_top = [rows[index].params.num_logprobs or 0 for index in asked]
    return dict(zip(asked, score(wanted, [token_ids[index] for index in asked], num_top), strict=True))
