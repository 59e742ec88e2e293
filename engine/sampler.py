"""Picks tokens from logits. Knows scores and parameters; knows no requests and no stop conditions.

A token is the arg-max of score plus Gumbel noise, and the noise is a hash of (seed, child, position, vocabulary id): the same
request draws the same tokens in any batch, on any worker, and again when it is resumed (design §2).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.errors import InternalError
from shoal.types import SamplingParams, TokenLogprobs

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64's multipliers


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to pick from one row of logits."""

    params: SamplingParams
    child: int  # 0 unless one request asks for several answers
    position: int  # of the token being drawn


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token; log-probabilities where they were asked for, before temperature and filters."""

    token_id: int
    logprobs: TokenLogprobs | None


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Draw one token per row of `logits` [rows, vocab] float32."""
    if len(logits) != len(rows):
        raise InternalError(f"{len(rows)} rows to sample, {len(logits)} rows of logits")
    if not rows:
        return []
    with torch.inference_mode():
        drawn = logits.argmax(-1)
        random = [index for index, row in enumerate(rows) if row.params.temperature > 0]
        if random:
            chosen = [rows[index] for index in random]
            index = torch.tensor(random, device=logits.device)
            scores = _filtered(logits[index], chosen) + _gumbel(chosen, logits.shape[1], logits.device)
            drawn[index] = scores.argmax(-1)
        logprobs = _logprobs(logits, drawn, rows)
        return [Sampled(token, logprobs.get(index)) for index, token in enumerate(drawn.tolist())]


def _filtered(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Scores over temperature in float64, −inf outside top_k and then top_p."""
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64, device=logits.device)
    scores = logits.to(torch.float64)
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None]  # the shift keeps tiny temperatures finite
    for index, row in enumerate(rows):
        top_k, top_p = row.params.top_k, row.params.top_p
        if 0 < top_k < scores.shape[1]:
            keep = scores[index].topk(top_k).indices
            kept = torch.full_like(scores[index], float("-inf"))
            kept[keep] = scores[index, keep]
            scores[index] = kept
        if top_p < 1:
            ordered, order = scores[index].sort(descending=True, stable=True)
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities  # the mass of everything better
            scores[index, order[before >= top_p]] = float("-inf")
    return scores


def _gumbel(rows: Sequence[SampleRow], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise [rows, vocab] float64, a function of each row's key and the vocabulary id alone."""
    keys = torch.tensor([_signed(_key(row)) for row in rows], dtype=torch.int64, device=device)
    x = keys[:, None] + torch.arange(1, vocab_size + 1, device=device) * _signed(_GOLDEN)  # SplitMix64, wrapping
    x = (x ^ _shifted(x, 30)) * _signed(_MIX[0])
    x = (x ^ _shifted(x, 27)) * _signed(_MIX[1])
    x = x ^ _shifted(x, 31)
    uniform = (_shifted(x, 12).to(torch.float64) + 0.5) * 2.0**-52  # 52 bits: with 53 the half rounds the largest up to 1
    return -torch.log(-torch.log(uniform))


def _key(row: SampleRow) -> int:
    key = 0
    for part in (row.params.seed, row.child, row.position):
        key = _mixed((key ^ part) + _GOLDEN)
    return key


def _mixed(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MIX[1]) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _logprobs(logits: torch.Tensor, drawn: torch.Tensor, rows: Sequence[SampleRow]) -> dict[int, TokenLogprobs]:
    asked = [index for index, row in enumerate(rows) if row.params.num_logprobs is not None]
    if not asked:
        return {}
    index = torch.tensor(asked, device=logits.device)
    scores = logits[index].log_softmax(-1)
    own = scores.gather(1, drawn[index, None])[:, 0].tolist()
    most = min(max(rows[i].params.num_logprobs or 0 for i in asked), logits.shape[1])
    values, ids = scores.topk(most, dim=-1)
    result = {}
    for at, (i, logprob) in enumerate(zip(asked, own, strict=True)):
        num_top = rows[i].params.num_logprobs or 0
        top = zip(ids[at, :num_top].tolist(), values[at, :num_top].tolist(), strict=True)
        result[i] = TokenLogprobs(logprob, tuple(top))
    return result
