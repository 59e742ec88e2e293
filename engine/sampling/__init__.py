"""From logits to tokens. Knows scores, parameters and token counts; knows no requests, no stop conditions and no text.

The order is vLLM's: constraint mask, logit_bias, min_tokens, penalties (edit.py) → temperature, min_p, top_k, top_p (filter.py) →
noise (noise.py) → arg-max (sample.py); pick.py does a whole step. Log-probabilities (logprobs.py) are of the raw logits.
"""

from shoal.engine.sampling.constraint import ConstraintMaker, TokenConstraint
from shoal.engine.sampling.counts import TokenCounts
from shoal.engine.sampling.logprobs import score
from shoal.engine.sampling.pick import Picked, Want, pick
from shoal.engine.sampling.rows import Sampled, SampleRow
from shoal.engine.sampling.sample import sample

__all__ = [
    "ConstraintMaker",
    "Picked",
    "SampleRow",
    "Sampled",
    "TokenConstraint",
    "TokenCounts",
    "Want",
    "pick",
    "sample",
    "score",
]
