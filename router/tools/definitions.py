"""Tool definitions and the choice among them, as OpenAI writes both. Knows their JSON; knows no template and no model."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from shoal.errors import InvalidRequest

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class ToolMode(StrEnum):
    """What the client allows."""

    NONE = "none"  # text only
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # at least one call
    NAMED = "named"  # this one


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` is set for NAMED only."""

    mode: ToolMode
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tools:
    """The definitions as the client sent them, and the choice."""

    definitions: tuple[Mapping[str, Any], ...]
    choice: ToolChoice

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.definitions)

    @property
    def offered(self) -> tuple[Mapping[str, Any], ...]:
        """What the prompt tells of: nothing when no call is wanted."""
        return () if self.choice.mode is ToolMode.NONE else self.definitions

    def call_schema(self) -> str | None:
        """The JSON schema that forces a call: an array of calls, or one call for NAMED. None when the model decides."""
        if self.choice.mode not in (ToolMode.REQUIRED, ToolMode.NAMED):
            return None
        shared: dict[str, Any] = {}
        calls = [
            _call_schema(tool["function"], shared)
            for tool in self.definitions
            if self.choice.mode is ToolMode.REQUIRED or tool["function"]["name"] == self.choice.name
        ]
        if self.choice.mode is ToolMode.NAMED:
            schema: dict[str, Any] = calls[0]
        else:
            schema = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
        return json.dumps(schema | ({"$defs": shared} if shared else {}))


def read_tools(tools_json: str, choice_json: str = "") -> Tools | None:
    """None when no tools are given. Raises InvalidRequest that names the tool, or the choice that fits none."""
    if not tools_json and not choice_json:
        return None
    definitions = _load(tools_json, "tools") if tools_json else []
    if not isinstance(definitions, list):
        raise InvalidRequest("tools must be a list of tool definitions")
    if len(definitions) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(definitions)} entries; send at most {MAX_TOOLS}")
    for index, tool in enumerate(definitions):
        _check(tool, f"tools[{index}]")
    names = [tool["function"]["name"] for tool in definitions]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools names one function twice")
    choice = _choice(_load(choice_json, "tool_choice") if choice_json else None, names)
    return Tools(tuple(definitions), choice) if definitions else None


def _check(tool: Any, where: str) -> None:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{where} must be an object")
    if tool.get("type", "function") != "function":
        raise InvalidRequest(f"{where}.type is {tool['type']!r}; only 'function' is offered")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{where}.function.name must be 1 to 64 letters, digits, '_', '-' or '.'")
    if not isinstance(function.get("description") or "", str):
        raise InvalidRequest(f"{where}.function.description must be a text")
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidRequest(f"{where}.function.parameters must be a JSON schema: an object")


def _choice(choice: Any, names: list[str]) -> ToolChoice:
    if choice is None:
        return ToolChoice(ToolMode.AUTO)
    if isinstance(choice, str) and choice in (ToolMode.NONE, ToolMode.AUTO, ToolMode.REQUIRED):
        if choice != ToolMode.NONE and not names:
            raise InvalidRequest(f"tool_choice is {choice!r} but no tools are given")
        return ToolChoice(ToolMode(choice))
    if not isinstance(choice, dict) or not isinstance(choice.get("function"), dict):
        raise InvalidRequest(
            'tool_choice must be \'none\', \'auto\', \'required\', or {"type": "function", "function": {"name": …}}'
        )
    name = choice["function"].get("name")
    if name not in names:
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools: {', '.join(names) or 'none are given'}")
    return ToolChoice(ToolMode.NAMED, name)


def _call_schema(function: Mapping[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
    if "properties" in parameters:  # no arguments but those that are described, unless the tool says otherwise
        parameters.setdefault("additionalProperties", False)
    for name, definition in parameters.pop("$defs", {}).items():  # references start at the root: move them there
        if shared.setdefault(name, definition) != definition:
            raise InvalidRequest(f"two tools define $defs.{name} differently; rename one")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _load(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest(f"{what} is nested too deeply") from None
