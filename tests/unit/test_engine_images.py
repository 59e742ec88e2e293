"""Prompts with images against transformers' whole models and the mask-level program: back ends, visibilities, chunks."""

import pytest
import torch

from shoal.engine.kv_pool import KvPool
from shoal.engine.local import LocalEngine, LocalRequest
from shoal.engine.vision import VisionEncoder
from shoal.engine.vision.tower import VisionTower
from shoal.errors import InvalidRequest, Unsupported
from shoal.types import DType
from tests import engine_support as support
from tests import image_support as images
from tests.oracle.mask_oracle import Case
from tests.unit.test_engine_oracle import assert_equals_oracle

GEMMA, QWEN = images.VARIANTS
PATTERNS = ["4a5", "a3", "2a2b3c4", "9a1"]
CASES = [
    Case("full"),
    Case("speed", 2, 1),
    Case("speed", 3, 0, 1),
    Case("speed", 4, 2),
    Case("pop", 2),
    Case("pop", 3, late=True),
    Case("pop", 4),
]
NUM_TOKENS = 4


@pytest.mark.parametrize("backend", support.BACKENDS)
@pytest.mark.parametrize("variant", images.VARIANTS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_full_depth_is_transformers_whole_model(variant: str, pattern: str, backend: str) -> None:
    """Its own masks, positions, towers and DeepStack: scores of every token that is sampled."""
    request = images.greedy(variant, pattern, "full")
    (result,) = images.engine(variant, backend).generate([request])
    ids = [*request.prompt_ids, *result.token_ids]
    expected = images.oracle(variant, pattern).whole_scores(images.text_half(variant), ids)[len(request.prompt_ids) - 1 :]
    for at, (token, logprobs) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        assert token == int(expected[at].argmax())
        assert all(abs(float(expected[at][top]) - score) < 1e-4 for top, score in logprobs.top)


def cases_of(variant: str, pattern: str) -> list[Case]:
    """With a first token of text there are anchors; with more text at the end, longer boundaries."""
    cases = [case for case in CASES if not case.anchors or pattern[0].isdigit()]
    if int(pattern[-1]) >= 3:
        cases += [Case("speed", 2, 0, 3), Case("pop", 2, boundary=2, late=True), Case("full", boundary=3)]
    if variant == GEMMA and pattern[0].isdigit():
        cases += [Case("speed", 2, 1, sink=True), Case("speed", 1, 1), Case("pop", 1)]
    return cases


@pytest.mark.parametrize("budget", [7, 512])
@pytest.mark.parametrize("backend", support.BACKENDS)
@pytest.mark.parametrize("variant", images.VARIANTS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_visibility_in_one_batch(variant: str, pattern: str, backend: str, budget: int) -> None:
    """All kinds and depths, beside prompts of text, cut into chunks; each equals the oracle, which has neither."""
    cases = cases_of(variant, pattern)
    requests = [images.greedy(variant, pattern, case.text, NUM_TOKENS) for case in cases]
    text = support.greedy([token + 6 for token in support.prompt(9, 3, 290)], "full", NUM_TOKENS)
    engine = images.engine(variant, backend, token_budget=budget)
    *results, plain = engine.generate([*requests, text])
    oracle = images.oracle(variant, pattern)
    num_clear = 0
    for case, request, result in zip(cases, requests, results, strict=True):
        expected = oracle.greedy(list(request.prompt_ids), case, NUM_TOKENS)
        assert_equals_oracle(result, expected)
        num_clear += expected.num_clear_steps
    assert num_clear > 0.9 * NUM_TOKENS * len(cases)  # the comparison is not empty
    support.assert_close(plain, support.engine(support.decoder(variant, backend=backend)).generate([text])[0])
    assert engine.blocks.num_used == 0


@pytest.mark.parametrize("variant", images.VARIANTS)
def test_answers_depend_on_what_is_compared(variant: str) -> None:
    """Guards the tests above: on the image, its place, who sees whom, positions and deeper features."""
    oracle = images.oracle(variant, "a")
    ids, _ = images.prompt(variant, "4a5")
    best = [oracle.greedy(list(ids), Case("pop", 2), 1).top5[0][0][1]]
    best.append(images.oracle(variant, "c" if variant == GEMMA else "a").greedy(list(ids)[1:], Case("pop", 2), 1).top5[0][0][1])
    for hook in ("_see_each_other", "_turned") if variant == GEMMA else ("_turned",):
        plain = images.oracle(variant, "a")
        setattr(plain, hook, getattr(super(type(plain), plain), hook))
        best.append(plain.greedy(list(ids), Case("pop", 2), 1).top5[0][0][1])
    if variant == QWEN:
        plain = images.oracle(variant, "a")
        plain._deep = []
        best.append(plain.greedy(list(ids), Case("pop", 2), 1).top5[0][0][1])
        assert len({round(score, 4) for score in best}) == len(best)
    else:
        assert len({round(score, 4) for score in best}) == len(best) - 1  # without grids, positions are the prompt's


@pytest.mark.parametrize("variant", images.VARIANTS)
def test_a_resumed_answer_goes_on_as_it_would_have(variant: str) -> None:
    """Replayed tokens are decode tokens behind the same prompt."""
    for visibility in ("full", "speed:2", "pop:2:late"):
        request = images.greedy(variant, "3a4", visibility, 6)
        whole = images.engine(variant).generate([request])[0]
        resumed = images.greedy(variant, "3a4", visibility, 3, replay=whole.token_ids[:3])
        assert images.engine(variant).generate([resumed])[0].token_ids == whole.token_ids[3:]


@pytest.mark.parametrize(
    "variant, pattern, visibility, words",
    [
        (GEMMA, "4a0", "full:boundary=4", "within its boundary"),
        (QWEN, "4a2", "speed:3:boundary=3", "within its boundary"),
        (QWEN, "4a2", "speed:3:anchors=5", "within 5 anchors"),
        (QWEN, "4a2", "speed:1", "depth of at least 2"),
    ],
)
def test_what_cannot_be_is_refused(variant: str, pattern: str, visibility: str, words: str) -> None:
    engine = images.engine(variant)
    with pytest.raises(InvalidRequest, match=words):
        engine.generate([images.greedy(variant, pattern, visibility)])
    assert engine.is_idle


def test_images_that_do_not_fit_their_prompt_are_refused() -> None:
    engine, request = images.engine(QWEN), images.greedy(QWEN, "3a4", "full")
    image, params = request.images[0], (request.visibility, request.sampling)
    moved = image.span.__class__(image.span.start + 1, image.span.num_tokens, image.span.digest, image.span.grid)
    turned = image.span.__class__(image.span.start, image.span.num_tokens, image.span.digest, (1, 5, 3))
    other = image.span.__class__(image.span.start, image.span.num_tokens, bytes(32), image.span.grid)
    for span, words in ((moved, "no image tokens at"), (turned, "its prompt has"), (other, "digest")):
        with pytest.raises(InvalidRequest, match=words):
            engine.generate([LocalRequest(request.prompt_ids, *params, images=(type(image)(image.data, span),))])
    with pytest.raises(InvalidRequest, match="belong to no image"):
        engine.generate([LocalRequest(request.prompt_ids, *params)])
    with pytest.raises(Unsupported, match="sees no images"):
        support.engine(support.decoder(QWEN)).generate([request])
    assert engine.is_idle and engine.blocks.num_used == 0


def test_a_damaged_image_ends_its_own_request_alone() -> None:
    engine, sound = images.engine(GEMMA), images.greedy(GEMMA, "3a4", "full")
    cut = images.PICTURES[0][:-200]
    ids = sound.prompt_ids
    placed = images.vision(GEMMA).place(ids, [cut])
    engine.submit("sound", sound)
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        engine.submit("damaged", LocalRequest(ids, sound.visibility, sound.sampling, images=placed))
    assert set(engine.run()) == {"sound"} and engine.blocks.num_used == 0


def test_bfloat16_stays_close() -> None:
    for variant in images.VARIANTS:
        decoder = support.decoder(variant, DType.BFLOAT16)
        encoder = VisionEncoder(VisionTower.load(support.model_files(variant), DType.BFLOAT16))
        engine = LocalEngine(decoder, KvPool(decoder.config.shape, 200, 16, DType.BFLOAT16), vision=encoder)
        request = images.greedy(variant, "3a4", "pop:2", 1)
        own, exact = engine.generate([request])[0], images.engine(variant).generate([request])[0]
        scores = dict(exact.logprobs[0].top)
        assert all(abs(score - scores[token]) < 0.5 for token, score in own.logprobs[0].top if token in scores)
        assert torch.isfinite(torch.tensor([score for _, score in own.logprobs[0].top])).all()
