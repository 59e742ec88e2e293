"""The sampler: a token depends on its row, seed, child and position, never on the batch."""

import math

import pytest
import torch

from shoal.engine.sampling import SampleRow, TokenCounts, noise, sample
from shoal.errors import InternalError
from shoal.types import SamplingParams

VOCAB = 50


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1, "temperature": 1.0} | changes))  # type: ignore[arg-type]


def logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw(scores: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [sampled.token_id for sampled in sample(scores, rows)]


def test_greedy_is_the_best_score_and_ignores_seed_and_filters() -> None:
    scores = logits(4)
    rows = [SampleRow(params(temperature=0.0, seed=i, top_k=3, top_p=0.1), 0, i) for i in range(4)]
    assert draw(scores, rows) == scores.argmax(-1).tolist()
    assert draw(torch.tensor([[1.0, 3.0, 3.0]]), rows[:1]) == [1]  # the first of equals


def test_independent_of_batch_composition_and_order() -> None:
    scores = logits(16)
    kinds = [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.3, "top_k": 9, "top_p": 0.9}, {"temperature": 0.0}]
    rows = [SampleRow(params(seed=i, **kinds[i % 5]), i % 3, 100 + i) for i in range(16)]
    together = draw(scores, rows)
    assert together == [draw(scores[i : i + 1], [rows[i]])[0] for i in range(16)]
    order = list(reversed(range(16)))
    assert draw(scores[order], [rows[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize("field", ["seed", "child", "position"])
def test_each_part_of_the_key_matters(field: str) -> None:
    flat = torch.zeros(64, 1000)
    keys = [{"seed": 7, "child": 1, "position": 3} | {field: value} for value in range(64)]
    rows = [SampleRow(params(seed=key["seed"]), key["child"], key["position"]) for key in keys]
    assert len(set(draw(flat, rows))) > 50


def test_largest_seed_and_swapped_keys() -> None:
    flat = torch.zeros(2, 100_000)
    assert len(set(draw(flat, [SampleRow(params(seed=(1 << 64) - 1), 0, 0), SampleRow(params(seed=(1 << 63) - 1), 0, 0)]))) == 2
    assert len(set(draw(flat, [SampleRow(params(seed=1), 2, 3), SampleRow(params(seed=2), 1, 3)]))) == 2


def test_frequencies_follow_the_scores() -> None:
    """Chi-square over 4,000 positions: Gumbel noise draws from softmax(score / temperature)."""
    scores, count = logits(1, 8, seed=3), 4000
    for temperature in (0.5, 1.0, 2.0):
        rows = [SampleRow(params(temperature=temperature, seed=11), 0, position) for position in range(count)]
        observed = torch.bincount(torch.tensor(draw(scores.expand(count, -1), rows)), minlength=8).double()
        expected = (scores[0].double() / temperature).softmax(-1) * count
        assert ((observed - expected) ** 2 / expected).sum() < 26  # p = 5e-4 at 7 degrees of freedom


def test_top_k_and_top_p_bound_the_support() -> None:
    scores, count = logits(1, 20, seed=5), 500
    order = scores[0].argsort(descending=True).tolist()
    for k in (1, 3):
        rows = [SampleRow(params(top_k=k, temperature=5.0), 0, position) for position in range(count)]
        assert set(draw(scores.expand(count, -1), rows)) == set(order[:k])
    cumulative = scores[0].double().softmax(-1)[order].cumsum(0).tolist()
    for p in (1e-9, 0.4, 0.8):
        nucleus = next(i for i, mass in enumerate(cumulative) if mass >= p) + 1
        rows = [SampleRow(params(top_p=p), 0, position) for position in range(count)]
        drawn = set(draw(scores.expand(count, -1), rows))
        assert drawn <= set(order[:nucleus]) and (nucleus > 5 or drawn == set(order[:nucleus]))


def test_top_k_applies_before_top_p() -> None:
    """Of [0.4, 0.3, 0.2, 0.1], top_k 2 leaves [4/7, 3/7]; top_p 0.5 of that is the first alone."""
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    rows = [SampleRow(params(top_k=2, top_p=0.5), 0, position) for position in range(200)]
    assert set(draw(scores.expand(200, -1), rows)) == {0}


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 1e8, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    scores = torch.tensor([[0.0, 40.0, -40.0, 39.0]])
    drawn = draw(scores.expand(100, -1), [SampleRow(params(temperature=temperature), 0, i) for i in range(100)])
    assert set(drawn) == {1} if temperature < 1 else set(drawn) == {0, 1, 2, 3}


def _unmixed(x: int) -> int:
    """The inverse of SplitMix64's mixing, to aim at one hash."""

    def unshifted(y: int, bits: int) -> int:
        x = y
        for _ in range(64 // bits):
            x = y ^ (x >> bits)
        return x

    first, second = (pow(multiplier % (1 << 64), -1, 1 << 64) for multiplier in noise._MIX)
    return unshifted(unshifted(unshifted(x, 31) * second % (1 << 64), 27) * first % (1 << 64), 30)


@pytest.mark.parametrize("bits", [0, (1 << 64) - 1])
def test_the_largest_and_the_smallest_hash_make_finite_noise(bits: int) -> None:
    """With infinite noise, one seed in 2^53 would draw a token however bad its score, and past every filter."""
    position, token = 3, 7
    seed = (_unmixed(bits) - (token + 1) * noise._GOLDEN) % (1 << 64)
    for part in (position, 0, 0):  # undo the key: position, child, start
        seed = ((_unmixed(seed) - noise._GOLDEN) % (1 << 64)) ^ part
    row = SampleRow(params(seed=seed), 0, position)
    drawn = noise.gumbel([row], torch.arange(VOCAB)[None])
    assert drawn.isfinite().all() and int(drawn.argmax() if bits else drawn.argmin()) == token
    scores = torch.zeros(1, VOCAB)
    scores[0, token] = -50.0
    assert draw(scores, [row]) != [token]
    assert draw(scores, [SampleRow(params(seed=seed, top_k=3), 0, position)]) != [token]


def test_logprobs_are_raw_and_only_where_asked() -> None:
    scores = logits(3)
    rows = [
        SampleRow(params(temperature=3.0, top_k=2, num_logprobs=4), 0, 9),
        SampleRow(params(num_logprobs=None), 0, 9),
        SampleRow(params(temperature=0.0, num_logprobs=0), 0, 9),
    ]
    first, second, third = sample(scores, rows)
    expected = scores.log_softmax(-1)
    assert second.logprobs is None
    assert first.logprobs is not None and third.logprobs is not None and third.logprobs.top == ()
    assert math.isclose(first.logprobs.logprob, expected[0, first.token_id].item(), abs_tol=1e-6)
    assert math.isclose(third.logprobs.logprob, expected[2].max().item(), abs_tol=1e-6)
    best = expected[0].topk(4)
    assert [token for token, _ in first.logprobs.top] == best.indices.tolist()
    assert [value for _, value in first.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-6)


def test_rows_must_match_logits() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
    with pytest.raises(InternalError, match="1 rows to sample, 2 rows of logits"):
        sample(logits(2), [SampleRow(params(), 0, 0)])


@pytest.mark.parametrize("penalty", [1e-45, 1e-37, 3e38])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.5}])
def test_a_penalty_beyond_the_numbers_range_harms_no_other_row(penalty: float, filters: dict[str, float]) -> None:
    scores = logits(2) * 100
    [alone] = draw(scores[:1], [SampleRow(params(), 0, 0)])
    counts = TokenCounts(tuple(range(20)), ())
    poison = SampleRow(params(repetition_penalty=penalty, **filters), 0, 0, counts=counts)
    first, second = sample(scores, [SampleRow(params(), 0, 0), poison])
    assert (first.token_id, first.is_sound, second.is_sound) == (alone, True, True)


def test_a_row_of_which_nothing_is_left_is_unsound_alone() -> None:
    scores = logits(2)
    scores[1] = float("-inf")
    first, second = sample(scores, [SampleRow(params(), 0, 0), SampleRow(params(top_k=2), 0, 0)])
    assert first.is_sound and not second.is_sound
