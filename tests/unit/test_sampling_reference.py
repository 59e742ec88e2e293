"""The batched sampler against a plain program: one row at a time, Python's own integers, numpy, no torch."""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.engine.sampling import SampleRow, TokenCounts, Want, pick, sample, score
from shoal.engine.sampling.edit import edited
from shoal.engine.sampling.filter import filtered
from shoal.errors import InternalError, InvalidRequest
from shoal.types import SamplingParams

VOCAB = 40
MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    """SplitMix64's finalizer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def noise(seed: int, child: int, position: int, token: int) -> float:
    key = 0
    for part in (seed, child, position):
        key = mixed(((key ^ part) + 0x9E3779B97F4A7C15) & MASK)
    uniform = ((mixed((key + (token + 1) * 0x9E3779B97F4A7C15) & MASK) >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(uniform))


def plain_edit(logits: NDArray[np.float32], params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """logit_bias, min_tokens, penalties."""
    scores = [np.float32(value) for value in logits]
    for token, bias in params.logit_bias:
        scores[token] += np.float32(bias)
    if len(answer) < params.min_tokens:
        for token in params.stop_token_ids:
            scores[token] = np.float32(-np.inf)
    for token in range(len(scores)):
        if token in prompt or token in answer:
            factor = np.float32(params.repetition_penalty)
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        scores[token] -= np.float32(params.frequency_penalty) * np.float32(list(answer).count(token))
        scores[token] -= np.float32(params.presence_penalty) * np.float32(token in answer)
    return [float(value) for value in scores]


def plain_filter(scores: Sequence[float], params: SamplingParams) -> list[float]:
    """temperature, min_p, top_k, top_p."""
    best = max(scores)
    warm = [(value - best) / params.temperature for value in scores]
    if params.min_p > 0:
        warm = [value if value >= math.log(params.min_p) else -math.inf for value in warm]
    if 0 < params.top_k < len(warm):
        last = sorted(warm, reverse=True)[params.top_k - 1]
        warm = [value if value >= last else -math.inf for value in warm]
    if params.top_p < 1:
        order = sorted(range(len(warm)), key=lambda token: (-warm[token], token))
        total, before = sum(math.exp(value) for value in warm), 0.0
        for token in order:
            share = math.exp(warm[token]) / total
            if before >= params.top_p:
                warm[token] = -math.inf
            before += share
    return warm


def plain_draw(logits: NDArray[np.float32], params: SamplingParams, child: int, prompt: list[int], answer: list[int]) -> int:
    scores = plain_edit(logits, params, prompt, answer)
    if params.temperature > 0:
        position = len(prompt) + len(answer)
        warm = plain_filter(scores, params)
        scores = [value + noise(params.seed, child, position, token) for token, value in enumerate(warm)]
    return int(np.argmax(scores))


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.6 else default

    return SamplingParams(
        max_tokens=30,
        seed=rng.getrandbits(64),
        temperature=maybe(rng.choice([0.2, 0.8, 1.0, 3.0]), 0.0),
        top_p=maybe(rng.choice([0.05, 0.5, 0.95]), 1.0),
        top_k=maybe(rng.choice([1, 2, 7, VOCAB, 99]), 0),
        min_p=maybe(rng.choice([0.01, 0.3, 1.0]), 0.0),
        repetition_penalty=maybe(rng.choice([0.3, 1.3, 5.0]), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe(tuple({rng.randrange(VOCAB): rng.uniform(-8, 8) for _ in range(5)}.items()), ()),
        stop_token_ids=tuple(rng.sample(range(VOCAB), 4)),
        min_tokens=maybe(rng.randrange(10), 0),
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_batch_draws_what_the_plain_program_draws_row_by_row(seed: int) -> None:
    rng = random.Random(seed)
    logits = torch.randn(120, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before, rows, expected = logits.clone(), [], []
    for index in range(len(logits)):
        params, child = random_params(rng), rng.randrange(5)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        answer = [rng.randrange(VOCAB) for _ in range(rng.randrange(12))]
        counts = TokenCounts(prompt, answer)
        rows.append(SampleRow(params, child, len(prompt) + len(answer), len(answer), counts))
        expected.append(plain_draw(logits[index].numpy(), params, child, prompt, answer))
    assert [drawn.token_id for drawn in sample(logits, rows)] == expected
    assert torch.equal(logits, before)  # log-probabilities are of what the model said
    assert len(set(expected)) > 20


@pytest.mark.parametrize(
    ("changes", "kept"),
    [  # scores are log(0.4, 0.3, 0.2, 0.1), so that each case can be checked by hand
        ({"min_p": 0.49}, {0, 1, 2}),
        ({"min_p": 0.51}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.69}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
        ({"top_k": 3, "top_p": 0.4}, {0}),  # of 4/9, 3/9, 2/9
        ({"top_k": 3, "top_p": 0.45}, {0, 1}),
        ({"min_p": 0.6, "top_p": 0.57}, {0}),  # of 4/7, 3/7
        ({"min_p": 0.6, "top_p": 0.58}, {0, 1}),
        ({"min_p": 0.5, "temperature": 0.5}, {0, 1}),  # after temperature: 0.16, 0.09, 0.04, 0.01
    ],
)
def test_filters_keep_what_they_say_in_their_order(changes: dict[str, Any], kept: set[int]) -> None:
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    params = SamplingParams(**({"max_tokens": 1, "temperature": 1.0} | changes))
    assert set(torch.isfinite(filtered(scores, [params])[0]).nonzero().flatten().tolist()) == kept


def test_equal_scores_share_one_fate_under_top_k_and_go_by_id_under_top_p() -> None:
    flat = torch.zeros(1, 8)
    kept = torch.isfinite(filtered(flat, [SamplingParams(1, temperature=1.0, top_k=2)]))
    assert kept.all()
    kept = torch.isfinite(filtered(flat, [SamplingParams(1, temperature=1.0, top_p=0.3)]))
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "filtered"])
def test_top_p_over_a_large_vocabulary_is_what_a_whole_sort_gives(kind: str) -> None:
    """Peaked rows are settled by their best few, flat ones and ties at the border are sorted whole, in one batch with others."""
    generator, vocab = torch.Generator().manual_seed(4), 6000
    peaked, flat = torch.randn(6, vocab, generator=generator) * 4, torch.randn(6, vocab, generator=generator) * 0.1
    ties = torch.randint(0, 3, (6, vocab), generator=generator).float()
    scores = {"peaked": peaked, "flat": flat, "ties": ties, "filtered": peaked}[kind]
    others = torch.cat([peaked, flat, ties])
    shares = [0.05, 0.5, 0.9, 0.99, 0.9999, 1e-9]
    top_k = 40 if kind == "filtered" else 0
    params = [SamplingParams(1, temperature=1.0, top_p=share, top_k=top_k) for share in shares]
    kept = filtered(torch.cat([scores, others]), params + [SamplingParams(1, temperature=1.0, top_p=0.7)] * len(others))
    for row, own in enumerate(params):
        expected = plain_filter(scores[row].double().tolist(), own)
        assert kept[row].tolist() == pytest.approx(expected)
        assert torch.equal(kept[row], filtered(scores[row : row + 1], [own])[0])
    rows = [SampleRow(own, 0, 3) for own in params]
    assert sample(scores, rows) == [sample(scores[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    for row, drawn in enumerate(sample(scores, rows)):
        noisy = [v + noise(0, 0, 3, token) if v > -math.inf else v for token, v in enumerate(kept[row].tolist())]
        assert drawn.token_id == int(np.argmax(noisy))


def test_penalties_by_hand() -> None:
    """Token 0 is in the prompt, 1 twice in the answer, 2 in both, 3 in neither."""
    logits = torch.tensor([[2.0, 2.0, -2.0, 2.0]])
    counts = TokenCounts([0, 2, 0], [1, 1, 2])
    for changes, expected in (
        ({"repetition_penalty": 2.0}, [1.0, 1.0, -4.0, 2.0]),
        ({"presence_penalty": 0.5}, [2.0, 1.5, -2.5, 2.0]),
        ({"frequency_penalty": 0.5}, [2.0, 1.0, -2.5, 2.0]),
        ({"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}, [1.0, 0.0, -4.75, 2.0]),
        ({"repetition_penalty": 2.0, "logit_bias": ((0, -3.0),)}, [-2.0, 1.0, -4.0, 2.0]),  # the bias comes first
    ):
        row = SampleRow(SamplingParams(9, **changes), 0, 6, 3, counts)  # type: ignore[arg-type]
        assert edited(logits, [row])[0].tolist() == expected
    assert edited(logits, [SampleRow(SamplingParams(9), 0, 6, 3, counts)]) is logits
    with pytest.raises(InternalError, match="no token counts"):
        sample(logits, [SampleRow(SamplingParams(9, presence_penalty=1.0), 0, 6, 3)])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=60), st.lists(st.integers(0, 50), max_size=300), st.integers(0, 300))
def test_counts_grow_as_they_would_be_rebuilt(prompt: list[int], answer: list[int], cut: int) -> None:
    rebuilt = TokenCounts(prompt, answer)
    grown = TokenCounts(prompt, answer[:cut])
    other = grown.copy()
    for token in answer[cut:]:
        grown.add(token)
    for token in range(51):
        other.add(token)  # a sibling's tokens are its own
    for counts in (rebuilt, grown):
        own = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
        assert own == {token: answer.count(token) for token in {*prompt, *answer}}


class Only:
    """Allows some tokens."""

    failure: str | None = None
    is_complete = False

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed

    def fill_mask(self, bitmask: NDArray[np.int32], row: int) -> None:
        for token in self.allowed:
            bitmask[row, token // 32] |= np.array(1 << (token % 32), dtype=np.uint32).view(np.int32)

    def accept(self, token_id: int) -> None:
        raise AssertionError("the sampler tells nobody")


def test_a_mask_comes_before_everything_and_wins_over_min_tokens() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    stopping = SamplingParams(9, temperature=1.0, stop_token_ids=(31, 33), min_tokens=5)
    rows = [
        SampleRow(SamplingParams(9, logit_bias=((3, 100.0),)), 0, 1, constraint=Only(0, 31, 32, 39)),
        SampleRow(stopping, 0, 1, constraint=Only(7, 31, 33)),
        SampleRow(stopping, 0, 1, constraint=Only(31, 33)),  # nothing but its stop ids may follow
        SampleRow(stopping, 0, 1),
    ]
    free, bound, stopped, plain = [drawn.token_id for drawn in sample(logits, rows)]
    allowed = [0, 31, 32, 39]
    assert free == allowed[int(logits[0, allowed].argmax())]
    assert bound == 7 and stopped in (31, 33) and plain not in (31, 33)


def test_many_answers_draw_from_one_row_and_given_tokens_are_scored_beside_them() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2))
    warm = SamplingParams(9, temperature=1.0, num_logprobs=1)
    wants = [
        Want([SampleRow(warm, child, 5) for child in range(3)], scored_ids=[4, 5], num_top=2),  # rows 0, 1, then 2
        Want(scored_ids=[6]),  # row 3
        Want(),
        Want([SampleRow(SamplingParams(9), 0, 1)]),  # row 4
        Want(scored_ids=[7], num_top=1),  # row 5
    ]
    picked = pick(logits, wants)
    expected = logits.log_softmax(-1)
    assert [len(own.drawn) for own in picked] == [3, 0, 0, 1, 0]
    assert picked[0].drawn == [sample(logits[2:3], [SampleRow(warm, child, 5)])[0] for child in range(3)]
    assert picked[3].drawn[0].token_id == int(logits[4].argmax())
    scores = [token.logprob for own in picked for token in own.scores]
    assert scores == pytest.approx([float(expected[row, token]) for row, token in ((0, 4), (1, 5), (3, 6), (5, 7))], abs=1e-6)
    assert [len(token.top) for own in picked for token in own.scores] == [2, 2, 0, 1]
    assert picked[0].scores[1].top[0][0] == int(logits[1].argmax())
    assert pick(torch.empty(0, VOCAB), [Want()])[0].drawn == [] and score(torch.empty(0, VOCAB), [], []) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_p": math.nan}, "min_p must lie"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be"),
        ({"presence_penalty": math.nan}, "presence_penalty must lie"),
        ({"frequency_penalty": 2.1}, "frequency_penalty must lie"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias values"),
        ({"logit_bias": ((1, 0.0), (1, 1.0))}, "names a token id twice"),
        ({"min_tokens": 2}, r"min_tokens must lie in 0…max_tokens \(1\)"),
    ],
)
def test_bad_values_name_their_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**({"max_tokens": 1} | changes))
