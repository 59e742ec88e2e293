"""How much each field of a public request may hold, checked before anything is done with it. Knows sizes; knows no meaning.

Every text and every list of the request messages has its line here (a test holds the table to the proto).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from shoal.errors import InvalidRequest

ELSEWHERE: Final = -1  # refused in words of its own: what fills the context with the prompt, images, the form of a visibility
_ID: Final = 256
_JSON: Final = 1 << 20

# characters of a text, entries of a list; of a list of texts also the characters of each
FIELD_SIZES: Final[Mapping[str, int | tuple[int, int]]] = {
    "GenerateRequest.request_id": _ID,
    "GenerateRequest.text": ELSEWHERE,
    "GenerateRequest.visibility": ELSEWHERE,
    "GenerateRequest.model": _ID,
    "GenerateRequest.cache_salt": _ID,
    "GenerateRequest.priority": 16,
    "GenerateRequest.images": ELSEWHERE,
    "ScoreRequest.request_id": _ID,
    "ScoreRequest.text": ELSEWHERE,
    "ScoreRequest.continuation_text": ELSEWHERE,
    "ScoreRequest.visibility": ELSEWHERE,
    "ScoreRequest.model": _ID,
    "ScoreRequest.cache_salt": _ID,
    "ScoreRequest.priority": 16,
    "ScoreRequest.images": ELSEWHERE,
    "TokenizeRequest.text": ELSEWHERE,
    "TokenizeRequest.model": _ID,
    "TokenizeRequest.images": ELSEWHERE,
    "DetokenizeRequest.token_ids": 1 << 20,
    "DetokenizeRequest.model": _ID,
    "AbortRequest.request_ids": (1024, _ID),
    "TokenizedInput.original_text": 64 << 20,
    "TokenizedInput.input_ids": ELSEWHERE,
    "ChatInput.messages": ELSEWHERE,
    "ChatInput.tools_json": _JSON,
    "ChatInput.tool_choice_json": 4096,
    "ChatMessage.role": 16,
    "ChatMessage.content": ELSEWHERE,
    "ChatMessage.content_parts": ELSEWHERE,
    "ContentPart.text": ELSEWHERE,
    "Image.data": ELSEWHERE,
    "ChatMessage.tool_calls_json": _JSON,
    "ChatMessage.tool_call_id": _ID,
    "ChatMessage.name": _ID,
    "SamplingParams.stop": (64, 1024),
    "SamplingParams.stop_token_ids": 1024,
    "SamplingParams.logit_bias": 1024,
    "SamplingParams.json_schema": 1 << 17,
    "SamplingParams.regex": 1 << 17,
    "SamplingParams.grammar": 1 << 17,
    "ChoiceConstraint.choices": (1024, 1 << 17),
}


def most_entries(field: str) -> int:
    """How many entries a list of the table may have."""
    size = FIELD_SIZES[field]
    return size[0] if isinstance(size, tuple) else size


def check_sizes(message: Any, path: str = "") -> None:
    """Raises InvalidRequest that names the first field that holds too much, how much, and the limit.

    Lists of messages are left to whoever reads them: how many there may be is checked first.
    """
    for field, value in message.ListFields():
        most, most_each, holds_fields = _limits(field)
        if most != ELSEWHERE and len(value) > most:
            unit = "entries" if field.is_repeated else "characters"
            raise InvalidRequest(f"{_join(path, field)} has {len(value)} {unit}; send at most {most}")
        if most_each != ELSEWHERE and (longest := max(map(len, value))) > most_each:
            raise InvalidRequest(f"{_join(path, field)} has an entry of {longest} characters; send at most {most_each}")
        if holds_fields:
            check_sizes(value, _join(path, field))


def _join(path: str, field: FieldDescriptor) -> str:
    return f"{path}.{field.name}" if path else str(field.name)


@lru_cache(maxsize=1024)
def _limits(field: FieldDescriptor) -> tuple[int, int, bool]:
    """Of a field: how many, how long each entry of a list of texts, and whether it is one message, whose fields are checked."""
    owner = field.containing_type
    size = FIELD_SIZES.get(f"{owner.name if owner is not None else ''}.{field.name}", ELSEWHERE)
    most, most_each = size if isinstance(size, tuple) else (size, ELSEWHERE)
    return most, most_each, field.message_type is not None and not field.is_repeated
