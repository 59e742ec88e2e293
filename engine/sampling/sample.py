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
        noisy = filtered(scores[index], [row.params for row in chosen]) + gumbel(chosen, logits.shape[1], logits.device)
        drawn[index] = noisy.argmax(-1)
    token_ids = drawn.tolist()
    logprobs = _logprobs(logits, token_ids, rows)
    return [Sampled(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)]


def _logprobs(logits: torch.Tensor, token_ids: list[int], rows: Sequence[SampleRow]) -> dict[int, TokenLogprobs]:
    """By row, for those that asked."""
    asked = [index for index, row in enumerate(rows) if row.params.num_logprobs is not None]
    if not asked:
        return {}
    wanted = logits if len(asked) == len(rows) else logits[torch.tensor(asked, device=logits.device)]
    num_top = [rows[index].params.num_logprobs or 0 for index in asked]
    return dict(zip(asked, score(wanted, [token_ids[index] for index in asked], num_top), strict=True))
