"""All that a step asks of its logits, at once: scores of given tokens, and draws. Knows the order of rows; knows no requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.engine.sampling.logprobs import score
from shoal.engine.sampling.rows import Sampled, SampleRow
from shoal.engine.sampling.sample import sample
from shoal.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Want:
    """What one sequence of a step wants of its rows of logits: one for each scored token, then one to draw from, if any."""

    draws: Sequence[SampleRow] = ()  # several answers may draw from the same row
    scored_ids: Sequence[int] = ()  # the token after each scored position
    num_top: int = 0  # beside each scored token


@dataclass(frozen=True, slots=True)
class Picked:
    """What came of one `Want`, in its order."""

    drawn: list[Sampled]
    scores: list[TokenLogprobs]


def pick(logits: torch.Tensor, wants: Sequence[Want]) -> list[Picked]:
    """Draw and score from `logits` [rows, vocab] float32, whose rows are those of the wants in order."""
    scored: list[int] = []
    drawn_from: list[int] = []
    first = 0
    for want in wants:
        scored += range(first, first + len(want.scored_ids))
        first += len(want.scored_ids)
        drawn_from += [first] * len(want.draws)
        first += bool(want.draws)
    ids = [token_id for want in wants for token_id in want.scored_ids]
    scores = iter(score(_rows(logits, scored), ids, [want.num_top for want in wants for _ in want.scored_ids]))
    drawn = iter(sample(_rows(logits, drawn_from), [row for want in wants for row in want.draws]))
    return [Picked([next(drawn) for _ in want.draws], [next(scores) for _ in want.scored_ids]) for want in wants]


def _rows(logits: torch.Tensor, index: list[int]) -> torch.Tensor:
    if index == list(range(len(logits))):
        return logits
    return logits[torch.tensor(index, dtype=torch.int64, device=logits.device)]
