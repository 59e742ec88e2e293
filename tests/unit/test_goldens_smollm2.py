"""Every stored golden, from programs that share no code with the engine, on the real model: one continuous batch of all.

tests/data/smollm2_visibility.json and own_goldens.json (tests/oracle/make_goldens.py). Rule of design §2: float32, the same
tokens except from a step where the reference's best two lie within 1e-4; log-probabilities to 1e-3.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.engine.local import LocalResult
from shoal.types import FinishReason
from tests import engine_support as support

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Golden:
    name: str
    prompt: tuple[int, ...]
    visibility: str
    output_ids: tuple[int, ...]
    top5: tuple[dict[int, float], ...]  # of the first steps
    num_clear: int


def golden(data: dict[str, Any], case: dict[str, Any]) -> Golden:
    text = case.get("visibility") or ":".join(
        [case["kind"]]
        + [str(case[name]) for name in ("K",) if name in case]
        + [f"anchors={case['anchors']}" for _ in range(case["kind"] == "speed")]
        + [f"boundary={case.get('boundary', 1)}"]
    )
    top5 = tuple({int(token): value for token, value in step} for step in case["top5"])
    return Golden(
        f"{case['prompt']}-{text}",
        tuple(data["prompts"][case["prompt"]]),
        text,
        tuple(case["output_ids"]),
        top5,
        case.get("clear_steps", len(case["output_ids"])),
    )


def load(name: str) -> list[Golden]:
    data = json.loads((DATA / name).read_text())
    return [golden(data, case) for case in data["cases"]]


GOLDENS = load("smollm2_visibility.json") + load("own_goldens.json")


@pytest.fixture(scope="module", params=support.BACKENDS)
def answers(request: pytest.FixtureRequest) -> dict[str, LocalResult]:
    """All goldens generated together, many visibilities and lengths, prompts chunked by a budget of 384 tokens."""
    engine = support.engine(support.smollm2(backend=request.param), num_blocks=9000, block_size=16, token_budget=384)
    for case in GOLDENS:
        engine.submit(case.name, support.greedy(case.prompt, case.visibility, len(case.output_ids), ignore_eos=False))
    results = engine.run()
    assert engine.blocks.num_used == 0
    return results


def test_goldens_cover_the_kinds() -> None:
    assert len(GOLDENS) >= 40 and len({case.name for case in GOLDENS}) == len(GOLDENS)
    assert min(len(case.prompt) for case in GOLDENS) == 1 and max(len(case.prompt) for case in GOLDENS) >= 700
    assert sum(case.num_clear for case in GOLDENS) > 0.95 * sum(len(case.output_ids) for case in GOLDENS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", GOLDENS, ids=lambda case: case.name)
def test_golden(case: Golden, answers: dict[str, LocalResult]) -> None:
    answer = answers[case.name]
    assert answer.token_ids[: case.num_clear] == case.output_ids[: case.num_clear]
    assert len(answer.token_ids) == len(case.output_ids)
    eos = support.smollm2().config.eos_token_ids
    assert answer.finish_reason is (FinishReason.STOP if case.output_ids[-1] in eos else FinishReason.LENGTH)
    for step, expected in enumerate(case.top5[: case.num_clear]):
        own = dict(answer.logprobs[step].top)
        assert len(own) == 5 and len(expected) == 5
        for token, value in expected.items():
            if token in own:
                assert abs(own[token] - value) < 1e-3
            else:  # a tie at the fifth place
                assert abs(min(own.values()) - value) < 1e-3
