"""Which tokens a random draw may pick: temperature, min_p, top_k, top_p, in this order, each over what the one before left.

Rows that ask for a filter are filtered together. Equal scores share one fate under top_k and min_p; under top_p the lower id
comes first. So a row's outcome depends on nothing but the row.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch

from shoal.types import SamplingParams

_NEVER = float("-inf")
_PREFIX: Final = 1024  # tokens of a row that top_p looks at first


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
        scores[index] = _nucleus(scores[index], column([params[at].top_p for at in by_mass]))
    return scores


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Scores [rows, vocab] without what lies beyond the mass `top_p` [rows, 1].

    The best few tell in most rows; a row in which they do not is sorted whole. Both give the row the same outcome.
    """
    vocab_size = scores.shape[1]
    probabilities = scores.softmax(-1)
    if vocab_size <= 2 * _PREFIX:
        return _cut(scores, probabilities, top_p, scores.sort(dim=-1, descending=True, stable=True).indices)[0]
    best = scores.topk(_PREFIX, dim=-1).indices.sort(dim=-1).values  # by id, so that the stable sort breaks ties by it
    order = scores.gather(1, best).sort(dim=-1, descending=True, stable=True).indices
    kept, is_sure = _cut(scores, probabilities, top_p, best.gather(1, order))
    if not bool(is_sure.all()):
        index = (~is_sure).nonzero()[:, 0]
        rest, shares = scores[index], probabilities[index]
        kept[index] = _cut(rest, shares, top_p[index], rest.sort(dim=-1, descending=True, stable=True).indices)[0]
    return kept


def _cut(
    scores: torch.Tensor, probabilities: torch.Tensor, top_p: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of scores when of `ids` [rows, m], the best ones in order, those within `top_p` are kept; and whether that is
    sure: the last one kept is better than the last of `ids`, so nothing outside them can matter.
    """
    ordered, shares = scores.gather(1, ids), probabilities.gather(1, ids)
    within = shares.cumsum(-1) - shares < top_p  # by the mass of everything better; always true of the first
    last = ordered.gather(1, within.sum(-1, keepdim=True) - 1)
    kept = torch.full_like(scores, _NEVER).scatter_(1, ids, ordered.masked_fill(~within, _NEVER))
    return kept, (last > ordered[:, -1:])[:, 0]
