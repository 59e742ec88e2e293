"""The quality gate's rule: what is read from replays, when a visibility leaves its band and when it is trusted again."""

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.shadow import ShadowConfig
from shoal.errors import InvalidConfig
from shoal.placement.quality_band import (
    Bound,
    Comparison,
    Readings,
    TokenScores,
    bound_left,
    compare,
    is_trusted_again,
    kl_lower_bound,
    read,
)
from shoal.visibility import Visibility

FULL, SPEED, POP = (Visibility.parse(text) for text in ("full", "speed:2", "pop:2"))


def config(**values: Any) -> ShadowConfig:
    return ShadowConfig(**({"rate": 0.01, "min_agreement": 0.9, "max_kl": 0.2, "window": 100, "min_samples": 10} | values))


def readings(agreement: float, kl_nats: float, num_samples: int = 10) -> Readings:
    return Readings(num_samples, 100 * num_samples, agreement, kl_nats)


@pytest.mark.parametrize(
    ("found", "left"),
    [
        (readings(0.9, 0.2), None),
        (readings(0.89, 0.0), Bound.AGREEMENT),
        (readings(1.0, 0.21), Bound.KL),
        (readings(0.1, 9.0), Bound.AGREEMENT),
        (readings(0.1, 9.0, num_samples=9), None),
    ],
)
def test_a_bound_is_left_when_enough_is_known(found: Readings, left: Bound | None) -> None:
    assert bound_left(config(), found) is left


def test_a_bound_of_zero_is_none() -> None:
    assert bound_left(config(min_agreement=0.0), readings(0.0, 0.1)) is None
    assert bound_left(config(max_kl=0.0), readings(0.95, 99.0)) is None
    assert bound_left(config(min_agreement=0.0, max_kl=0.0), readings(0.0, 99.0)) is None


@pytest.mark.parametrize(
    ("found", "seconds", "is_trusted"),
    [
        (readings(0.92, 0.16), 300.0, True),
        (readings(0.92, 0.16), 299.0, False),  # cool-down
        (readings(0.92, 0.16, num_samples=9), 300.0, False),
        (readings(0.91, 0.0), 300.0, False),  # inside the band, and not by a fifth of the way to perfect
        (readings(1.0, 0.17), 300.0, False),
    ],
)
def test_trust_comes_back_well_inside_the_band(found: Readings, seconds: float, is_trusted: bool) -> None:
    assert is_trusted_again(config(), found, seconds) is is_trusted


@given(
    least=st.floats(0, 1), most=st.floats(0, 5), hysteresis=st.floats(0, 1), agreement=st.floats(0, 1), kl_nats=st.floats(0, 10)
)
def test_what_is_trusted_again_has_left_no_bound(
    least: float, most: float, hysteresis: float, agreement: float, kl_nats: float
) -> None:
    """So no reading moves the gate both ways; and perfect quality always comes back."""
    own, found = config(min_agreement=least, max_kl=most, hysteresis=hysteresis), readings(agreement, kl_nats)
    if is_trusted_again(own, found, 300.0):
        assert bound_left(own, found) is None
    assert is_trusted_again(own, readings(1.0, 0.0), 300.0)


def test_a_window_counts_tokens_alike() -> None:
    assert read([Comparison(1, 0, 3.0), Comparison(3, 3, 1.0)]) == Readings(2, 4, 0.75, 1.0)
    assert read([]) == Readings(0, 0, 1.0, 0.0)


def scores(logits: list[float], token_id: int, num_top: int) -> TokenScores:
    whole = math.log(math.fsum(map(math.exp, logits)))
    top = sorted(((index, value - whole) for index, value in enumerate(logits)), key=lambda pair: -pair[1])
    return TokenScores(token_id, logits[token_id] - whole, top[:num_top])


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0, 9.0])
def test_the_divergence_is_a_lower_bound_and_exact_where_all_is_named(spread: float, noise: float) -> None:
    rng = random.Random(f"{spread} {noise}")
    for _ in range(50):
        deep = [rng.gauss(0, spread) for _ in range(60)]
        other = [value + rng.gauss(0, noise) for value in deep]
        token = rng.randrange(60)
        whole, shallow = scores(deep, token, 60), scores(other, token, 60)
        exact = math.fsum(math.exp(p) * (p - dict(shallow.top)[index]) for index, p in whole.top)
        assert kl_lower_bound(whole, shallow) == pytest.approx(exact, abs=1e-4)
        for num_top in (1, 5, 20):
            bound = kl_lower_bound(scores(deep, token, num_top), scores(other, token, num_top))
            assert 0 <= bound <= exact * (1 + 1e-6) + 1e-4
    same = scores(deep, 0, 5)
    assert kl_lower_bound(same, same) == pytest.approx(0.0, abs=1e-6)


def test_confident_depths_that_disagree_are_told_even_from_one_name_each() -> None:
    full, shallow = TokenScores(7, math.log(0.01), [(3, math.log(0.95))]), TokenScores(7, math.log(0.9), [(7, math.log(0.9))])
    assert kl_lower_bound(full, shallow) > 2
    assert compare([full, shallow], [shallow, shallow]) == Comparison(2, 1, pytest.approx(kl_lower_bound(full, shallow)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rate": 1.5}, r"shadow_rate must lie in \[0, 1\], not 1.5"),
        ({"rate": -0.1}, "shadow_rate must lie in"),
        ({"rate": math.nan}, "shadow_rate must lie in"),
        ({"min_agreement": 1.1}, "shadow_min_agreement must lie in"),
        ({"hysteresis": 2.0}, "shadow_hysteresis must lie in"),
        ({"max_kl": -1.0}, "shadow_max_kl must be a finite number, 0 or more"),
        ({"max_kl": math.inf}, "shadow_max_kl must be a finite number"),
        ({"cool_down_s": math.nan}, "shadow_cool_down_s must be a finite number"),
        ({"window": 0}, "shadow_window must be at least 1"),
        ({"min_samples": 0}, "shadow_min_samples must be at least 1"),
        ({"min_samples": 101}, "101 can never be reached in a shadow_window of 100; lower it, or widen the window"),
        ({"rate": 0.0}, "shadow_min_agreement 0.9 has no effect while nothing is replayed; set shadow_rate"),
        ({"rate": 0.0, "min_agreement": 0.0}, "shadow_max_kl 0.2 has no effect"),
    ],
)
def test_bad_settings_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        config(**values)


def test_there_must_be_something_to_compare() -> None:
    config().check_policies([FULL, SPEED])
    ShadowConfig().check_policies([SPEED])
    with pytest.raises(InvalidConfig, match="which visibilities speed:2,pop:2 do not allow; add full"):
        config().check_policies([SPEED, POP])
    with pytest.raises(InvalidConfig, match="and visibilities full name none; add one"):
        config().check_policies([FULL])
