"""The engine against the independent mask-level program, on tiny random-weight models of every architecture."""

import pytest

from shoal.engine.local import LocalResult
from tests import engine_support as support
from tests.oracle.mask_oracle import Case, Greedy, MaskOracle

CASES = [
    Case("full"),
    Case("full", boundary=5),
    *(
        Case("speed", depth, anchors, boundary)
        for depth, anchors, boundary in [(1, 1, 1), (2, 0, 1), (2, 3, 2), (3, 1, 4), (3, 99, 1), (4, 2, 3)]
    ),
    *(
        Case("pop", depth, boundary=boundary, late=late)
        for depth, boundary, late in [(1, 1, False), (2, 3, True), (3, 1, False), (3, 4, True), (4, 1, False)]
    ),
]
SINKS = [Case("speed", depth, anchors, boundary, sink=True) for depth, anchors, boundary in [(1, 1, 1), (2, 2, 3), (3, 1, 1)]]
LENGTHS = [1, 2, 5, 19]
NUM_TOKENS = 4


def assert_equals_oracle(result: LocalResult, expected: Greedy, tolerance: float = 1e-4) -> None:
    clear = expected.num_clear_steps
    assert list(result.token_ids[:clear]) == expected.token_ids[:clear]
    for logprobs, top in zip(result.logprobs[:clear], expected.top5, strict=False):
        assert len(logprobs.top) == len(top) == 5
        assert all(abs(own[1] - other[1]) < tolerance for own, other in zip(logprobs.top, top, strict=True))


@pytest.mark.parametrize("backend", support.BACKENDS)
@pytest.mark.parametrize("variant", support.VARIANTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_visibility_in_one_chunked_batch(variant: str, length: int, backend: str) -> None:
    """All kinds and depths join one batch whose token budget cuts the prompts; each equals the oracle, which has neither."""
    oracle = MaskOracle(support.reference(variant))
    cases = CASES + (SINKS if "window" in variant else [])
    requests = [support.greedy(support.prompt(length, seed), case.text, NUM_TOKENS) for seed, case in enumerate(cases)]
    engine = support.engine(support.decoder(variant, backend=backend), token_budget=24)
    num_clear = 0
    for case, request, result in zip(cases, requests, engine.generate(requests), strict=True):
        expected = oracle.greedy(list(request.prompt_ids), case, NUM_TOKENS)
        assert_equals_oracle(result, expected)
        num_clear += expected.num_clear_steps
    assert num_clear > 0.9 * NUM_TOKENS * len(cases)  # the comparison is not empty
    assert engine.blocks.num_used == 0


@pytest.mark.parametrize("variant", support.VARIANTS)
def test_visibilities_differ_where_they_should(variant: str) -> None:
    """Guards the tests above: the oracle's answers depend on kind, depth, anchors, boundary and sink."""
    oracle = MaskOracle(support.reference(variant))
    near, far = list(support.prompt(5)), list(support.prompt(19))  # all of `near` lies within the window

    def best(ids: list[int], case: Case) -> float:
        return round(oracle.greedy(ids, case, 1).top5[0][0][1], 4)

    cases = [Case("full"), Case("speed", 2, 1), Case("speed", 2, 3), Case("pop", 2), Case("speed", 2, 1, 3)]
    assert len({best(near, case) for case in cases}) == len(cases)
    if "window" in variant:
        assert best(far, Case("speed", 2, 1)) != best(far, Case("speed", 2, 1, sink=True))
