"""Which tokens a random draw may pick: temperature, min_p, top_k, top_p, in this order, each over what the one before left.

Rows that ask for a filter are filtered together. Equal scores share one fate under top_k and min_p; under top_p the lower id
comes first. So a row's outcome depends on nothing but the row.
"""

import math
from collections.abc import Sequence

import torch

from shoal.types import SamplingParams

_NEVER = float("-inf")


def filtered(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Scores [rows, vocab] over temperature (> 0) in float64, −inf where a filter leaves a token out."""
    device, vocab_size = scores.device, scores.shape[1]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    scores = scores.to(torch.float64)
    temperature = column([own.temperature for own in params])
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature  # the shift keeps tiny temperatures finite
    if any(own.min_p > 0 for own in params):
        floor = column([math.log(own.min_p) if own.min_p > 0 else _NEVER for own in params])
        scores = scores.masked_fill(scores < floor, _NEVER)  # the best one has score 0
    by_rank = [index for index, own in enumerate(params) if 0 < own.top_k < vocab_size]
    if by_rank:
        ranks = [params[index].top_k for index in by_rank]
        index = torch.tensor(by_rank, device=device)
        own = scores[index]
        last = own.topk(max(ranks), dim=-1).values.gather(1, column(ranks, torch.int64) - 1)
        scores[index] = own.masked_fill(own < last, _NEVER)
    by_mass = [index for index, own in enumerate(params) if own.top_p < 1]
    if by_mass:
        index = torch.tensor(by_mass, device=device)
        ordered, order = scores[index].sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # the mass of everything better
        ordered = ordered.masked_fill(before >= column([params[at].top_p for at in by_mass]), _NEVER)
        scores[index] = torch.empty_like(ordered).scatter_(1, order, ordered)
    return scores
