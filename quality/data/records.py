"""Reads JSON lines of texts, prompts with responses, and conversations. Knows no tokens.

{"text": "a long text"}                                    cut into a prompt and its continuation
{"prompt": "one user message", "response": "its answer"}   the prompt as it is, or through the chat template
{"messages": [{"role": "user", ...}, ..., {"role": "assistant", ...}]}   the last answer is the response
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.errors import InvalidConfig

_FORMS: Final = '{"text": …}, {"prompt": …, "response": …} or {"messages": […, {"role": "assistant", …}]}'
_ROLES: Final = frozenset({"system", "user", "assistant"})


@dataclass(frozen=True, slots=True)
class Record:
    """One line. Exactly one of the three forms is there; `where` names it in messages."""

    where: str
    text: str | None = None
    prompt: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()  # without the last answer
    response: str | None = None


def read_jsonl(path: Path) -> list[Record]:
    """Every line that is not blank. Raises InvalidConfig that names file and line and says what a line must hold."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InvalidConfig(f"data {str(path)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"data {str(path)!r} cannot be read as UTF-8 text: {error}") from error
    records = [_record(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise InvalidConfig(f"data {str(path)!r} holds no line; each must be {_FORMS}")
    return records


def _record(where: str, line: str) -> Record:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InvalidConfig(f"{where} is not JSON ({error}); each line must be {_FORMS}") from error
    if not isinstance(found, dict):
        raise InvalidConfig(f"{where} is not an object; each line must be {_FORMS}")
    for name in ("text", "prompt", "response"):
        if name in found and (not isinstance(found[name], str) or not found[name]):
            raise InvalidConfig(f"{where}: {name!r} must be a text that is not empty")
    if "text" in found:
        return Record(where, text=found["text"])
    if "messages" in found:
        return _conversation(where, found["messages"])
    if "prompt" in found:
        if "response" not in found:
            raise InvalidConfig(
                f"{where} has a prompt and no response, and what is measured is how well the response follows; add "
                f'"response", or give long texts as {{"text": …}}'
            )
        return Record(where, prompt=found["prompt"], response=found["response"])
    raise InvalidConfig(f"{where} holds {sorted(found)}; each line must be {_FORMS}")


def _conversation(where: str, messages: object) -> Record:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidConfig(f"{where}: 'messages' must be a list of objects with role and content")
    for message in messages:
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str) and message.get("role") in _ROLES
        if not is_message:
            raise InvalidConfig(f"{where}: every message needs a role ({', '.join(sorted(_ROLES))}) and a content of text")
    *before, last = messages
    if last["role"] != "assistant" or not last["content"]:
        raise InvalidConfig(f"{where}: the last message must be the assistant's response, which is what is measured")
    if not before:
        raise InvalidConfig(f"{where}: a message must come before the assistant's response")
    return Record(where, messages=tuple(before), response=last["content"])
