"""What a constraint lets through: random walks over its masks, its refusals in words, its bounds. No model, no torch."""

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.constraints import MAX_CHARACTERS, MAX_CHOICES, AnswerConstraint, ConstraintCompiler
from shoal.errors import InvalidConfig, InvalidRequest, Unsupported
from shoal.model_files import Tokenizer, load_tokenizer, open_model, write_random_model
from shoal.types import Constraint, ConstraintKind
from tests.folders import temporary_folder

EOS, PADDED = 2, 340  # the vocabulary has 300 tokens, the model's head 340
ROOT = Path(__file__).parents[2]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "日本"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
AMBIGUOUS = Constraint(ConstraintKind.GRAMMAR, 'start: e\ne: e e | "a"')
SCHEMAS = [PERSON, {"anyOf": [{"const": 'x\n"y'}, {"type": "null"}]}, {"type": "number", "minimum": -3, "maximum": 1e3}]
REGEXES = [r"[a-z]{2,5}@[a-z]{1,4}\.(com|de)", r"(日|本){1,6}", r"[0-9]{4}-[0-9]{2}", r"x?", r"[^\x00-\x7f]{1,4}"]


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_model(str(write_random_model(temporary_folder(), vocab_size=300))))


@cache
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, PADDED, [EOS])


def schema(value: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


def allowed(constraint: AnswerConstraint) -> set[int]:
    mask = np.full((3, -(-PADDED // 32)), 7, np.int32)
    constraint.fill_mask(mask, 1)
    assert (mask[[0, 2]] == 7).all()  # rows of others are left alone
    bits = np.unpackbits(mask[1].view(np.uint8), bitorder="little")
    return {int(token_id) for token_id in np.flatnonzero(bits[:PADDED])}


def walk(constraint: Constraint, seed: int, max_tokens: int = 400, stop_ids: Collection[int] = (EOS,)) -> tuple[str, list[int]]:
    """Any answer the masks let through, to its end: its text, and its ids with the one that ended it."""
    rng, answer, ids = random.Random(seed), compiler().make(constraint, stop_ids), []
    for _ in range(max_tokens):
        ids.append(rng.choice(sorted(allowed(answer))))
        assert answer.failure is None and ids[-1] < 300
        answer.accept(ids[-1])
        if ids[-1] in stop_ids or answer.is_complete:
            return tokenizer().decode(ids[:-1], skip_special_tokens=False), ids
    raise AssertionError(f"no end after {max_tokens} tokens: {tokenizer().decode(ids)}")


@pytest.mark.parametrize("seed", range(8))
def test_every_answer_to_a_schema_is_valid(seed: int) -> None:
    for wanted in SCHEMAS:
        text, _ = walk(schema(wanted), seed)
        jsonschema.validate(json.loads(text), wanted)


@pytest.mark.parametrize("seed", range(8))
def test_every_answer_to_a_regex_matches_it(seed: int) -> None:
    for wanted in REGEXES:
        text, _ = walk(regex(wanted), seed)
        assert re.fullmatch(wanted, text) and "\ufffd" not in text


@pytest.mark.parametrize("seed", range(4))
def test_every_answer_to_a_grammar_derives_from_it(seed: int) -> None:
    lark = 'start: sum\nsum: NUMBER (("+" | "-") NUMBER){0,3}\nNUMBER: /[1-9][0-9]{0,2}/'
    text, _ = walk(Constraint(ConstraintKind.GRAMMAR, lark), seed)
    assert re.fullmatch(r"[1-9]\d{0,2}([+-][1-9]\d{0,2}){0,3}", text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=5), st.integers())
def test_choices_are_themselves_and_nothing_else(choices: list[str], seed: int) -> None:
    assume(all(tokenizer().decode(tokenizer().encode(choice)) == choice for choice in choices))
    text, _ = walk(Constraint(ConstraintKind.CHOICES, json.dumps(choices, ensure_ascii=False)), seed)
    assert text in choices


def test_the_end_may_come_where_the_answer_is_whole_and_only_there() -> None:
    answer = compiler().make(regex("a(bc)?"), [EOS])
    seen = []
    for character in "abc":
        seen.append(EOS in allowed(answer))
        answer.accept(tokenizer().encode(character)[0])
    assert seen == [False, True, False] and allowed(answer) == {EOS}


def test_stop_ids_end_only_a_whole_answer_unless_nothing_else_may_come() -> None:
    [bang] = tokenizer().encode("!")
    whole = compiler().make(regex("[a!]{2}"), [EOS, bang])
    assert bang not in allowed(whole) and allowed(whole)
    for character in "aa":
        whole.accept(tokenizer().encode(character)[0])
    assert allowed(whole) == {EOS, bang}  # either ends it; neither is text
    forced = compiler().make(regex("!a"), [EOS, bang])
    assert allowed(forced) == {bang}


def test_ignored_eos_comes_only_at_the_very_end() -> None:
    text, ids = walk(regex("a{1,3}"), 3, stop_ids=())
    assert (text, ids[-1]) == ("aaa", EOS)  # "a" and "aa" could have ended, had EOS counted
    answer = compiler().make(regex("a{1,3}"), ())
    answer.accept(tokenizer().encode("a")[0])
    assert EOS not in allowed(answer) and not answer.is_complete


def test_a_replayed_answer_goes_on_where_it_was() -> None:
    for cut in (1, 3, 7):
        _, ids = walk(schema(PERSON), 5)
        resumed, whole = compiler().make(schema(PERSON), [EOS]), compiler().make(schema(PERSON), [EOS])
        for token_id in ids[:cut]:
            resumed.accept(token_id)  # without masks in between
            allowed(whole)
            whole.accept(token_id)
        assert allowed(resumed) == allowed(whole) and ids[cut] in allowed(resumed)


def test_what_cannot_be_followed_fails_in_words_without_the_answers_text() -> None:
    answer = compiler().make(regex("[a-f]{9}"), [EOS])
    for character in "deadbef":
        answer.accept(tokenizer().encode(character)[0])
    assert allowed(answer) and answer.failure is None
    answer.accept(tokenizer().encode("Z")[0])
    answer.catch_up()
    assert answer.failure is not None and "deadbef" not in answer.failure and "state" not in answer.failure
    assert len(allowed(answer)) == PADDED  # a mask is still a mask: the whole step must not fail for one request
    answer.accept(EOS)


def test_an_ambiguous_grammar_gets_stuck_before_its_steps_get_long() -> None:
    answer, [a] = compiler().make(AMBIGUOUS, [EOS]), tokenizer().encode("a")
    num_tokens = 0
    while allowed(answer) and answer.failure is None:
        answer.accept(a)
        num_tokens += 1
    assert answer.failure is not None and "max is 500" in answer.failure and 50 < num_tokens < 1000


def test_white_space_in_json_is_bounded() -> None:
    answer, [blank] = compiler().make(schema({"type": "object"}), [EOS]), tokenizer().encode(" ")
    answer.accept(tokenizer().encode("{")[0])
    num_blanks = 0
    while blank in allowed(answer):
        answer.accept(blank)
        num_blanks += 1
        assert num_blanks < 100
    assert num_blanks == 20


BAD = [
    (Constraint(ConstraintKind.JSON_SCHEMA, '{"type":'), "json_schema is not JSON: "),
    (Constraint(ConstraintKind.JSON_SCHEMA, ""), "json_schema is not JSON: "),
    (Constraint(ConstraintKind.JSON_SCHEMA, "[1]"), "json_schema must be a JSON object"),
    (Constraint(ConstraintKind.JSON_SCHEMA, "[" * 100_000), "json_schema is not JSON"),
    (schema({"type": "objekt"}), "json_schema: Invalid type: objekt"),
    (schema({"type": "array", "contains": {}}), r"json_schema: Unimplemented keys: \[\"contains\"\]"),
    (schema({"$ref": "http://example.com/a.json"}), "json_schema: .*does not fetch"),
    (schema({"type": "string", "pattern": "("}), "json_schema: regex parse error"),
    (schema(False), "json_schema must be a JSON object: nothing matches false"),
    (regex("("), "regex: .*unclosed group"),
    (regex("a(?=b)"), "regex: .*look-around"),
    (regex(r"[^\s\S]"), "regex: no answer can match"),
    (regex("a" * (MAX_CHARACTERS + 1)), f"regex has {MAX_CHARACTERS + 1} characters; send at most {MAX_CHARACTERS}"),
    (Constraint(ConstraintKind.GRAMMAR, ""), "grammar: Empty grammar"),
    (Constraint(ConstraintKind.GRAMMAR, 'start: "a" b'), 'grammar: .*unknown name: "b"'),
    (Constraint(ConstraintKind.GRAMMAR, "start: start"), "grammar: no answer can match"),
    (Constraint(ConstraintKind.CHOICES, "[]"), f"choice must have 1…{MAX_CHOICES} entries, not 0"),
    (Constraint(ConstraintKind.CHOICES, '["a", ""]'), "choice must not have an empty entry"),
    (Constraint(ConstraintKind.CHOICES, "[1]"), "choice must be an array of strings"),
    (Constraint(ConstraintKind.CHOICES, json.dumps(["x"] * (MAX_CHOICES + 1))), "choice must have"),
]


@pytest.mark.parametrize(("bad", "words"), BAD, ids=lambda value: str(getattr(value, "text", ""))[:20])
def test_bad_constraints_are_refused_with_the_field_and_the_grammars_own_words(bad: Constraint, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        compiler().check(bad)
    assert len(str(caught.value)) < 700 and not compiler().knows(bad)


def test_the_deepest_constraints_of_the_permitted_length_do_not_overflow_the_stack() -> None:
    code = f"""
import itertools, json, string, threading
from shoal.constraints import ConstraintCompiler, MAX_CHARACTERS
from shoal.model_files import load_tokenizer, open_model
from shoal.errors import InvalidRequest
from shoal.types import Constraint, ConstraintKind
made = ConstraintCompiler(lambda: load_tokenizer(open_model({str(_folder())!r})), 300, [2])
names = ("".join(name) for length in (2, 3) for name in itertools.product(string.ascii_lowercase, repeat=length))
names = ["start", *itertools.islice((name for name in names if name not in ("start",)), 16000)]
rules = [f"{{a}}:{{b}}" for a, b in itertools.pairwise(names)]
for upper in (False, True):
    lark = "\\n".join([*rules, f'{{names[-1]}}:"a"'])
    if upper:
        lark = lark.upper().replace('"A"', '"a"').replace("START", "start")
    assert MAX_CHARACTERS * 0.9 < len(lark) <= MAX_CHARACTERS, len(lark)
    try:
        answer = made.make(Constraint(ConstraintKind.GRAMMAR, lark), [2])
        answer.accept(80)
        answer.catch_up()
    except InvalidRequest as error:
        print(str(error)[:80])
num = 2900
defs = {{f"d{{i}}": {{"allOf": [{{"$ref": f"#/$defs/d{{i + 1}}"}}]}} for i in range(num)}} | {{f"d{{num}}": {{"type": "null"}}}}
made.check(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({{"$ref": "#/$defs/d0", "$defs": defs}}, separators=(",", ":"))))
for text in ("(" * 60_000 + "a" + ")" * 60_000, "(" * 40_000 + "a" + ")*" * 40_000):
    try:
        made.check(Constraint(ConstraintKind.REGEX, text))
    except InvalidRequest as error:
        print(str(error)[:80])
print("alive", threading.stack_size())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": "src"}, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert done.stdout.endswith("alive 0\n")


@cache
def _folder() -> Path:
    return write_random_model(temporary_folder(), vocab_size=300)


def test_equal_constraints_compile_once_and_only_the_last_ones_are_remembered() -> None:
    own = ConstraintCompiler(tokenizer, PADDED, [EOS], max_remembered=3)
    threads = [threading.Thread(target=own.check, args=(schema(PERSON),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert own.num_compiled == 1 and own.knows(schema(PERSON))
    for number in range(3):
        own.check(schema(PERSON))  # used, so not the oldest
        own.check(regex(f"{number}"))
    assert own.num_compiled == 4 and own.knows(schema(PERSON)) and not own.knows(regex("0"))
    answers = [own.make(schema(PERSON), [EOS]) for _ in range(2)]
    answers[0].accept(tokenizer().encode("{")[0])
    assert allowed(answers[0]) != allowed(answers[1])  # each answer has its own place
    assert own.num_compiled == 4


def test_a_model_without_a_tokenizer_says_so() -> None:
    def missing() -> Tokenizer:
        raise InvalidConfig("there is no tokenizer.json")

    with pytest.raises(Unsupported, match=r"without the model's tokenizer: there is no tokenizer\.json"):
        ConstraintCompiler(missing, 300, [EOS]).check(regex("a"))


def test_the_real_vocabulary() -> None:
    model = open_model("smollm2-135m")
    real = load_tokenizer(model)
    own = ConstraintCompiler(lambda: real, model.config.shape.vocab_size, model.config.eos_token_ids)
    answer = own.make(schema(PERSON), model.config.eos_token_ids)
    text = json.dumps({"name": "Zoé", "age": 41, "tags": ["日本"], "ok": True}, ensure_ascii=False)
    for token_id in real.encode(text):
        mask = np.zeros((1, -(-model.config.shape.vocab_size // 32)), np.int32)
        answer.fill_mask(mask, 0)
        assert mask[0, token_id // 32] >> (token_id % 32) & 1
        assert not mask[0, 0] >> 2 & 1  # <|im_end|>
        answer.accept(token_id)
    answer.fill_mask(mask, 0)
    assert mask[0, 0] == 1 << 2 and not mask[0, 1:].any()
