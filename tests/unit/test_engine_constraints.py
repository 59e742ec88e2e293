"""Constrained answers of a model: valid at any temperature and visibility, first token included; neighbours are untouched."""

import json
import re
from typing import Any

import jsonschema
import pytest

from shoal.constraints import ConstraintCompiler
from shoal.engine.local import LocalEngine, LocalRequest, LocalResult
from shoal.errors import InvalidRequest, Unsupported
from shoal.model_files import load_tokenizer
from shoal.types import Constraint, ConstraintKind, FinishReason, SamplingParams
from shoal.visibility import Visibility
from tests import engine_support as support

EOS = 2
VISIBILITIES = ["full", "speed:2", "pop:2", "pop:1:late"]
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 4}, "num": {"type": "integer", "minimum": -9, "maximum": 99}},
    "required": ["word", "num"],
    "additionalProperties": False,
}
REGEX = r"[a-z]{1,6}(-[0-9]{1,3}){2}"
CONSTRAINTS = [Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)), Constraint(ConstraintKind.REGEX, REGEX)]
TOKENIZER = load_tokenizer(support.model_files())


def check(constraint: Constraint, text: str) -> None:
    if constraint.kind is ConstraintKind.REGEX:
        assert re.fullmatch(REGEX, text), text
    else:
        jsonschema.validate(json.loads(text), SCHEMA)


def ask(index: int, visibility: str, constraint: Constraint | None, **sampling: Any) -> LocalRequest:
    defaults: dict[str, Any] = {"max_tokens": 250, "temperature": 0.0, "seed": index, "num_logprobs": 1}
    return LocalRequest(
        support.prompt(5 + 7 * (index % 5), index),
        Visibility.parse(visibility),
        SamplingParams(**(defaults | sampling), constraint=constraint),
    )


def engine(**options: Any) -> LocalEngine:
    compiler = ConstraintCompiler(lambda: TOKENIZER, support.model_files().config.shape.vocab_size, [EOS])
    return support.engine(support.decoder(), num_blocks=6000, make_constraint=compiler.make, **options)


def text_of(result: LocalResult) -> str:
    assert result.finish_reason is FinishReason.STOP and result.token_ids[-1] == EOS
    return TOKENIZER.decode(result.token_ids[:-1], skip_special_tokens=False)


@pytest.mark.parametrize("visibility", VISIBILITIES)
def test_every_answer_is_valid_at_any_temperature(visibility: str) -> None:
    temperatures = [0.0, 0.3, 1.0, 2.5, 30.0]
    requests = [
        ask(index, visibility, constraint, temperature=temperature)
        for index, temperature in enumerate(temperatures)
        for constraint in CONSTRAINTS
    ]
    results = engine().generate(requests)
    for request, result in zip(requests, results, strict=True):
        assert request.sampling.constraint is not None
        check(request.sampling.constraint, text_of(result))
    assert len({result.token_ids for result in results}) > len(temperatures)


def test_neighbours_of_constrained_rows_are_what_they_are_alone() -> None:
    requests = [ask(i, VISIBILITIES[i % 4], [*CONSTRAINTS, None][i % 3], temperature=0.8 * (i % 2)) for i in range(9)]
    for index, request in enumerate(requests):
        if request.sampling.constraint is None:
            requests[index] = ask(index, VISIBILITIES[index % 4], None, max_tokens=20, ignore_eos=True, repetition_penalty=1.3)
    alone = [engine().generate([request])[0] for request in requests]
    together = engine(token_budget=13).generate(requests)
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    for request, result in zip(requests, together, strict=True):
        if request.sampling.constraint is not None:
            check(request.sampling.constraint, text_of(result))


def test_log_probabilities_are_those_before_the_mask() -> None:
    free, bound = (
        ask(3, "full", None, max_tokens=1, num_logprobs=20),
        ask(3, "full", CONSTRAINTS[0], max_tokens=1, num_logprobs=20),
    )
    [without], [masked] = engine().generate([free]), engine().generate([bound])
    assert [top[1] for top in masked.logprobs[0].top] == pytest.approx([top[1] for top in without.logprobs[0].top])
    assert masked.token_ids[0] == TOKENIZER.encode("{")[0] != without.token_ids[0]  # the very first token was masked


def test_a_resumed_answer_is_the_same_answer() -> None:
    for constraint in CONSTRAINTS:
        whole = ask(4, "speed:2", constraint, temperature=1.0)
        [expected] = engine().generate([whole])
        for cut in (1, 4, len(expected.token_ids) - 1):
            rest = LocalRequest(whole.prompt_ids, whole.visibility, whole.sampling, replay_token_ids=expected.token_ids[:cut])
            [resumed] = engine().generate([rest])
            assert resumed.token_ids == expected.token_ids[cut:]


def test_min_tokens_and_ignored_eos_yield_to_the_end_of_the_grammar() -> None:
    bounded = Constraint(ConstraintKind.REGEX, "[a-z]{0,40}")
    for request, shortest in (
        (ask(1, "full", bounded, temperature=1.0, min_tokens=12), 12),
        (ask(1, "full", bounded, temperature=1.0, ignore_eos=True), 20),  # two letters a token at most
        (ask(1, "full", Constraint(ConstraintKind.REGEX, "ab"), min_tokens=100), 1),
    ):
        [result] = engine().generate([request])
        assert shortest <= len(result.token_ids) - 1 <= 40
        assert re.fullmatch("[a-z]*", text_of(result))
    biased = ask(1, "full", bounded, logit_bias=((EOS, 100.0),))
    assert engine().generate([biased])[0].token_ids == (EOS,)
    cut = ask(2, "full", CONSTRAINTS[0], max_tokens=3)
    assert engine().generate([cut])[0].finish_reason is FinishReason.LENGTH


def test_a_grammar_that_gets_stuck_ends_its_request_with_words() -> None:
    ambiguous = Constraint(ConstraintKind.GRAMMAR, 'start: e\ne: e e | "a"')
    own = engine()
    with pytest.raises(InvalidRequest, match=r"can be followed no further \(.*max is 500.*\); simplify it"):
        own.generate([ask(0, "full", ambiguous, max_tokens=400, logit_bias=((EOS, -100.0),))])
    assert own.is_idle and own.blocks.num_used == 0


def test_bad_and_impossible_constraints_are_refused_before_any_work() -> None:
    own = engine()
    with pytest.raises(InvalidRequest, match=r"regex: .*unclosed group"):
        own.submit("bad", ask(0, "full", Constraint(ConstraintKind.REGEX, "(")))
    with pytest.raises(Unsupported, match="no tokenizer"):
        support.engine(support.decoder()).submit("bad", ask(0, "full", CONSTRAINTS[0]))
    assert own.is_idle
