"""Whether a shallow visibility's quality keeps to its band, and when it is trusted again. Has no clock; knows no request.

        leaves the band (min_samples or more in the window)
    SERVED ─────────────────────────────────────────────▶ FULL       the window begins anew at each arrow
       ▲                                                    │
       └── well inside the band (hysteresis), cool-down over ┘

Quality is read from replays (router/shadow.py): the same answer's tokens scored under full depth and under the visibility. A
token agrees when both depths find the same token most likely. The divergence is a lower bound of KL(full ‖ shallow) from the top
log-probabilities of both; it cannot cry wolf, and where both tops hold nearly all probability it is nearly exact.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shoal.config.shadow import ShadowConfig

_LEAST: Final = 1e-6  # probability of whatever is outside a top: float32 sums are no more exact than this
Top = Sequence[tuple[int, float]]  # (token id, log-probability), best first


class Standing(StrEnum):
    """What requests that ask for the visibility get."""

    SERVED = "served"
    FULL = "full"


class Bound(StrEnum):
    """Which bound was left."""

    AGREEMENT = "agreement"
    KL = "kl"


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One answer token as one depth sees it."""

    token_id: int
    logprob: float
    top: Top  # at least one


@dataclass(frozen=True, slots=True)
class Comparison:
    """One replayed answer."""

    num_tokens: int  # 1 or more
    num_agreeing: int
    kl_nats: float  # summed over the tokens


@dataclass(frozen=True, slots=True)
class Readings:
    """A window of comparisons, each token counting alike. Without any: perfect, and no samples."""

    num_samples: int
    num_tokens: int
    agreement: float  # share of tokens
    kl_nats: float  # mean per token


def compare(full: Sequence[TokenScores], shallow: Sequence[TokenScores]) -> Comparison:
    """The same tokens under both depths, in order."""
    pairs = list(zip(full, shallow, strict=True))
    agreeing = sum(deep.top[0][0] == other.top[0][0] for deep, other in pairs)
    return Comparison(len(pairs), agreeing, math.fsum(kl_lower_bound(deep, other) for deep, other in pairs))


def kl_lower_bound(full: TokenScores, shallow: TokenScores) -> float:
    """Nats. Two lower bounds of KL(full ‖ shallow), the greater of them, and never less than 0.

    By the log-sum inequality, lumping tokens together only lowers the divergence. `coarse` lumps all tokens that not both depths
    name. `fine` takes those that only full depth names one by one: the shallow depth gives each at most what it gives the last of
    its own top.
    """
    deep, other = dict(full.top) | {full.token_id: full.logprob}, dict(shallow.top) | {shallow.token_id: shallow.logprob}
    last = min(value for _, value in shallow.top)
    shared = math.fsum(math.exp(value) * (value - other[token]) for token, value in deep.items() if token in other)
    alone = math.fsum(math.exp(value) * (value - last) for token, value in deep.items() if token not in other)
    deep_shared = math.fsum(math.exp(value) for token, value in deep.items() if token in other)
    other_rest = max(_LEAST, 1 - math.fsum(math.exp(other[token]) for token in deep if token in other))
    coarse = shared + _lumped(1 - deep_shared, other_rest)
    fine = shared + alone + _lumped(1 - math.fsum(math.exp(value) for value in deep.values()), other_rest)
    return max(0.0, coarse, fine)


def _lumped(deep: float, other: float) -> float:
    return deep * math.log(deep / other) if deep > _LEAST else 0.0


def read(window: Iterable[Comparison]) -> Readings:
    """What a window says."""
    samples = list(window)
    num_tokens = sum(sample.num_tokens for sample in samples)
    if not num_tokens:
        return Readings(0, 0, 1.0, 0.0)
    agreement = sum(sample.num_agreeing for sample in samples) / num_tokens
    return Readings(len(samples), num_tokens, agreement, math.fsum(sample.kl_nats for sample in samples) / num_tokens)


def bound_left(config: ShadowConfig, readings: Readings) -> Bound | None:
    """Which bound a served visibility has left; None while it keeps to the band, or too little is known."""
    if readings.num_samples < config.min_samples:
        return None
    if readings.agreement < config.min_agreement:
        return Bound.AGREEMENT
    if config.max_kl and readings.kl_nats > config.max_kl:
        return Bound.KL
    return None


def is_trusted_again(config: ShadowConfig, readings: Readings, seconds_at_full: float) -> bool:
    """Whether a visibility that fell is well inside the band, by samples taken since. `hysteresis` 0: just inside; 1: perfect."""
    if readings.num_samples < config.min_samples or seconds_at_full < config.cool_down_s:
        return False
    least = config.min_agreement + config.hysteresis * (1 - config.min_agreement) if config.min_agreement else 0.0
    most = config.max_kl * (1 - config.hysteresis) if config.max_kl else math.inf
    return readings.agreement >= least and readings.kl_nats <= most
