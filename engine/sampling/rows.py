"""One row of a sampling step, and what comes of it. Plain data."""

from dataclasses import dataclass

from shoal.engine.sampling.constraint import TokenConstraint
from shoal.engine.sampling.counts import TokenCounts
from shoal.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to pick from one row of logits."""

    params: SamplingParams
    child: int  # 0 unless one request asks for several answers
    position: int  # of the token being drawn
    num_drawn: int = 0  # tokens drawn before, as min_tokens counts them
    counts: TokenCounts | None = None  # needed where params.has_penalties
    constraint: TokenConstraint | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token; log-probabilities where they were asked for, before everything that changes scores."""

    token_id: int
    logprobs: TokenLogprobs | None
    is_sound: bool = True  # False: the row's best score is no finite number, and the token means nothing
