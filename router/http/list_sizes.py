"""How much the lists of a body may hold, checked before it is parsed and as soon as it is, before anything is done for an entry.

A body is read on the event loop, where every other answer waits for it. Knows names and sizes; leaves wrong types to the readers.
"""

from collections.abc import Mapping
from typing import Any, Final

from shoal.errors import InvalidRequest
from shoal.router.field_sizes import most_entries
from shoal.router.http.errors import BadField
from shoal.router.tools.definitions import MAX_TOOLS
from shoal.router.tools.prompt import MAX_PARTS  # of content, and here of tool calls, over all messages

MAX_PROMPTS: Final = 128  # in one request
MAX_MESSAGES: Final = 16_384
MAX_IDS: Final = 1 << 20  # over all prompts

MAX_STRUCTURE: Final = 1 << 18  # brackets, braces and colons of a body: what parsing it costs

_ENTRIES: Final[Mapping[str, int]] = {
    "messages": MAX_MESSAGES,
    "tools": MAX_TOOLS,
    **{name: most_entries(f"SamplingParams.{name}") for name in ("stop", "stop_token_ids", "logit_bias")},
    "tokens": MAX_IDS,
    "modalities": 16,
}
_MAX_VISIBILITY: Final = 128  # characters


def check_structure(body: bytes | bytearray) -> None:
    """Raises InvalidRequest for more objects, lists and fields than are parsed in good time; those inside texts count too."""
    found = sum(body.count(mark) for mark in (b"[", b"{", b":"))
    if found > MAX_STRUCTURE:
        raise InvalidRequest(f"the body has {found} of the characters [, {{ and :, texts included; send at most {MAX_STRUCTURE}")


def check_lists(body: Any) -> None:
    """Raises BadField that names the first list that holds too much, how much, and the limit."""
    if not isinstance(body, dict):
        return
    for name, most in _ENTRIES.items():
        _check(name, body.get(name), most)
    form = body.get("structured_outputs")
    if isinstance(form, dict):
        _check("structured_outputs.choice", form.get("choice"), most_entries("ChoiceConstraint.choices"))
    visibility = body.get("visibility")
    if isinstance(visibility, str) and len(visibility) > _MAX_VISIBILITY:
        raise BadField("visibility", f"visibility has {len(visibility)} characters; send at most {_MAX_VISIBILITY}")
    _check_prompt(body.get("prompt"))
    _check_messages(body.get("messages"))


def _check(name: str, value: Any, most: int) -> None:
    if isinstance(value, list | dict) and len(value) > most:
        raise BadField(name, f"{name} has {len(value)} entries; send at most {most}")


def _check_prompt(prompt: Any) -> None:
    if not isinstance(prompt, list) or not prompt:
        return
    if not isinstance(prompt[0], str | list):
        _check("prompt", prompt, MAX_IDS)
        return
    if len(prompt) > MAX_PROMPTS:
        raise BadField("prompt", f"prompt holds {len(prompt)} prompts; send at most {MAX_PROMPTS} at once")
    num_ids = sum(len(one) for one in prompt if isinstance(one, list))
    if num_ids > MAX_IDS:
        raise BadField("prompt", f"prompt holds {num_ids} token ids; send at most {MAX_IDS} at once")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        return
    for name, what in (("content", "parts of content"), ("tool_calls", "tool calls")):
        lists = (message.get(name) for message in messages if isinstance(message, dict))
        num_entries = sum(len(value) for value in lists if isinstance(value, list))
        if num_entries > MAX_PARTS:
            raise BadField("messages", f"messages hold {num_entries} {what}; send at most {MAX_PARTS}")
