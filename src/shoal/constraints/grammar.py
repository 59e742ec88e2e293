"""From a constraint as users write it to llguidance's own form. Knows the notations; knows no vocabulary."""

import json
from typing import Final

from llguidance import LLMatcher

from shoal.errors import InvalidRequest
from shoal.types import Constraint, ConstraintKind

MAX_CHARACTERS: Final = 1 << 17  # of a constraint; the deepest nesting it allows fits the stack that compiles it
MAX_CHOICES: Final = 1024

# White space between JSON tokens, in place of llguidance's unbounded run: a model that likes blanks would never end.
_WHITE_SPACE: Final = r"[\x20\x0A\x0D\x09]{1,20}"
_FIELDS: Final = {
    ConstraintKind.JSON_SCHEMA: "json_schema",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.CHOICES: "choice",
}


def field_name(constraint: Constraint) -> str:
    """The public field that it came in."""
    return _FIELDS[constraint.kind]


def grammar_of(constraint: Constraint) -> str:
    """Raises InvalidRequest that names the field, for what can be seen without a vocabulary."""
    if len(constraint.text) > MAX_CHARACTERS:
        raise InvalidRequest(f"{field_name(constraint)} has {len(constraint.text)} characters; send at most {MAX_CHARACTERS}")
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _json_grammar(_schema(constraint.text))
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(constraint.text)
        case ConstraintKind.CHOICES:
            alternatives = (json.dumps(choice).replace("\x7f", "\\u007f") for choice in _choices(constraint.text))
            return LLMatcher.grammar_from_lark("start: " + " | ".join(alternatives))


def _json_grammar(schema: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITE_SPACE})
    except ValueError as error:  # it reads JSON more strictly than Python: depth, the range of numbers
        raise InvalidRequest(f"json_schema cannot be read: {error}; nest it less, or use smaller numbers") from None


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"json_schema is not JSON: {error}") from None
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise InvalidRequest("json_schema must be a JSON object" + (": nothing matches false" if schema is False else ""))
    return text


def _choices(text: str) -> list[str]:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"choice is not a JSON array of strings: {error}") from None
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest("choice must be an array of strings")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"choice must have 1…{MAX_CHOICES} entries, not {len(choices)}")
    if not all(choices):
        raise InvalidRequest("choice must not have an empty entry")
    return choices
