"""Changes to scores that hold for greedy picks too: constraint mask, logit_bias, min_tokens, penalties, in this order.

All rows of a step at once: every edit is a few (row, token id) pairs, gathered, changed and scattered back.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.engine.sampling.rows import SampleRow
from shoal.errors import InternalError

_NEVER = float("-inf")


def edited(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Scores [rows, vocab]: a copy with every edit, or `logits` itself where no row asks for one."""
    constrained = [index for index, row in enumerate(rows) if row.constraint is not None]
    biased = [index for index, row in enumerate(rows) if row.params.logit_bias]
    unstoppable = [index for index, row in enumerate(rows) if row.num_drawn < row.params.min_tokens]
    penalised = [index for index, row in enumerate(rows) if row.params.has_penalties]
    if not (constrained or biased or unstoppable or penalised):
        return logits
    scores = logits.clone()
    if constrained:
        _mask(scores, rows, constrained)
    if biased:
        pairs = _Pairs.of(((index, [token for token, _ in rows[index].params.logit_bias]) for index in biased), scores)
        bias = [value for index in biased for _, value in rows[index].params.logit_bias]
        pairs.write(pairs.read() + torch.tensor(bias, dtype=scores.dtype, device=scores.device))
    if unstoppable:
        _forbid_stop(scores, rows, unstoppable)
    if penalised:
        _penalise(scores, rows, penalised)
    return scores


class _Pairs:
    """Distinct (row, token id) places of a score matrix."""

    def __init__(self, scores: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, lengths: list[int]) -> None:
        self._scores, self._rows, self._ids, self._lengths = scores, rows, ids, lengths

    @classmethod
    def of(cls, places: Iterable[tuple[int, Sequence[int] | NDArray[np.int64]]], scores: torch.Tensor) -> "_Pairs":
        rows, ids = zip(*places, strict=True)
        lengths = [len(own) for own in ids]
        flat = np.concatenate([np.asarray(own, dtype=np.int64) for own in ids])
        at = np.repeat(np.asarray(rows, dtype=np.int64), lengths)
        return cls(scores, torch.from_numpy(at).to(scores.device), torch.from_numpy(flat).to(scores.device), lengths)

    def read(self) -> torch.Tensor:
        return self._scores[self._rows, self._ids]

    def write(self, values: torch.Tensor) -> None:
        self._scores[self._rows, self._ids] = values

    def spread(self, per_row: Sequence[float]) -> torch.Tensor:
        """One number per row, repeated for each of its pairs."""
        values = torch.tensor(per_row, dtype=self._scores.dtype)
        return values.repeat_interleave(torch.tensor(self._lengths)).to(self._scores.device)


def _mask(scores: torch.Tensor, rows: Sequence[SampleRow], constrained: list[int]) -> None:
    vocab_size = scores.shape[1]
    bitmask = np.zeros((len(constrained), -(-vocab_size // 32)), dtype=np.int32)
    for at, index in enumerate(constrained):
        constraint = rows[index].constraint
        if constraint is not None:
            constraint.fill_mask(bitmask, at)
    words = torch.from_numpy(bitmask).to(scores.device)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=scores.device)) & 1
    allowed = bits.view(len(constrained), -1)[:, :vocab_size].bool()
    scores[constrained] = scores[constrained].masked_fill(~allowed, _NEVER)


def _forbid_stop(scores: torch.Tensor, rows: Sequence[SampleRow], unstoppable: list[int]) -> None:
    """No stop id before min_tokens; a constraint that allows nothing else wins."""
    pairs = _Pairs.of(((index, rows[index].params.stop_token_ids) for index in unstoppable), scores)
    bound = [index for index in unstoppable if rows[index].constraint is not None]
    saved = scores[bound].clone() if bound else None
    pairs.write(torch.full((), _NEVER, dtype=scores.dtype, device=scores.device))
    if saved is not None:
        own = scores[bound]
        dead = (own == _NEVER).all(-1, keepdim=True)
        scores[bound] = torch.where(dead, saved, own)


def _penalise(scores: torch.Tensor, rows: Sequence[SampleRow], penalised: list[int]) -> None:
    """repetition over prompt and answer: divides positive scores, multiplies negative ones; then frequency and presence."""
    tallies = [rows[index].counts for index in penalised]
    known = [tally for tally in tallies if tally is not None]
    if len(known) != len(tallies):
        raise InternalError("a row with penalties has no token counts")
    params = [rows[index].params for index in penalised]
    pairs = _Pairs.of(zip(penalised, (tally.ids for tally in known), strict=True), scores)
    counts = torch.from_numpy(np.concatenate([tally.counts for tally in known])).to(scores.device, scores.dtype)
    repetition = pairs.spread([own.repetition_penalty for own in params])
    values = pairs.read()
    is_allowed = values > _NEVER
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - pairs.spread([own.frequency_penalty for own in params]) * counts
    values = values - pairs.spread([own.presence_penalty for own in params]) * (counts > 0)
    most = torch.finfo(values.dtype).max  # a tiny or huge repetition penalty leaves the numbers' range, never the token's row
    pairs.write(torch.where(is_allowed, values.clamp(-most, most), _NEVER))
