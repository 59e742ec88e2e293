"""Finds tool calls in a growing answer, so that names and arguments can be streamed. Knows text; calls no tool.

What is not a call is text, and none of it is lost. Feeding the answer in pieces or at once gives the same calls and text.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from shoal.router.tools.call_reader import CallReader

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"


class CallStyle(Enum):
    """How a model writes calls."""

    TAGGED = auto()  # <tool_call>{…}</tool_call> or <tool_call>[{…}, …]</tool_call>: Hermes, Qwen, SmolLM2
    BARE = auto()  # the answer is {…}, {…}; {…} or [{…}, …], and names a known tool: Llama 3, and every forced call

    @classmethod
    def of_template(cls, template: str | None) -> "CallStyle":
        """What the model's chat template teaches. Templates that know nothing of tools get the tagged form."""
        source = template or ""
        return cls.BARE if OPEN not in source and '"parameters"' in source and "tools" in source else cls.TAGGED


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of call `index`; the first of each has the name, and all arguments joined are its JSON."""

    index: int
    name: str | None
    arguments: str


Event: TypeAlias = TextDelta | CallDelta


class _State(Enum):
    START = auto()  # of a bare answer
    TEXT = auto()
    BETWEEN = auto()  # inside the calls, outside an object
    CALL = auto()
    PLAIN = auto()  # nothing but text from here on


class ToolCallParser:
    """`push` text, then `finish`; both return what is new."""

    def __init__(self, style: CallStyle, names: frozenset[str]) -> None:
        self.num_calls = 0
        self._tagged = style is CallStyle.TAGGED
        self._names = names
        self._state = _State.TEXT if self._tagged else _State.START
        self._held = ""  # what may yet be the beginning of a tag
        self._space = ""  # white space that is dropped if a call follows
        self._block = ""  # read since the last text or call, and text after all if no call comes of it
        self._reader = CallReader()
        self._started = False  # the current call has been told
        self._num_arguments = 0  # characters of its arguments that have been told
        self._events: list[Event] = []

    def push(self, text: str) -> list[Event]:
        """Events of a piece of the answer."""
        text, self._held = self._held + text, ""
        while text:
            match self._state:
                case _State.TEXT:
                    text = self._read_text(text)
                case _State.START:
                    text = self._read_start(text)
                case _State.BETWEEN:
                    text = self._read_between(text)
                case _State.CALL:
                    text = self._read_call(text)
                case _State.PLAIN:
                    self._tell_text(text)
                    text = ""
        return self._take()

    def finish(self) -> list[Event]:
        """Events once the answer is whole: what could have become a call, and did not, is text."""
        rest, self._held = self._held, ""
        if self._state in (_State.TEXT, _State.START, _State.PLAIN):
            self._tell_text(rest)
        elif (self._state is _State.BETWEEN and self._block.startswith(OPEN)) or not self._started:
            self._give_up()
            self._tell_text(rest)
        if not self.num_calls and self._space:
            self._events.append(TextDelta(self._space))
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _read_text(self, text: str) -> str:
        before, tag, after = text.partition(OPEN)
        if tag:
            self._tell_text(before)
            self._block, self._state = OPEN, _State.BETWEEN
            return after
        num_held = next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:n])), 0)
        self._held = text[len(text) - num_held :]
        self._tell_text(text[: len(text) - num_held])
        return ""

    def _read_start(self, text: str) -> str:
        stripped = text.lstrip()
        if stripped.startswith(PYTHON_TAG):
            stripped = stripped[len(PYTHON_TAG) :].lstrip()
        if not stripped or PYTHON_TAG.startswith(stripped):
            self._held = text
            return ""
        self._state = _State.BETWEEN if stripped[0] in "{[" else _State.PLAIN
        if self._state is _State.BETWEEN:
            self._block = text[: len(text) - len(stripped)]
            return stripped
        return text

    def _read_between(self, text: str) -> str:
        char = text[0]
        if char == "{":
            self._reader, self._started, self._num_arguments = CallReader(), False, 0
            self._state = _State.CALL
            return text
        if self._tagged and char == "<":
            if text.startswith(CLOSE):
                self._block = ""  # nothing but separators: an empty list of calls says that none is needed
                self._state = _State.TEXT
                return text[len(CLOSE) :]
            if CLOSE.startswith(text):
                self._held = text
                return ""
        elif char.isspace() or char in ("[],;" if not self._tagged else "[],"):
            self._block += char
            return text[1:]
        self._give_up()
        return text

    def _read_call(self, text: str) -> str:
        num_read = self._reader.feed(text)
        self._block += text[:num_read]
        rest = text[num_read:]
        if self._is_known():
            self._tell_call()
        if self._started:
            self._block = ""
        if self._reader.is_broken or (self._reader.is_done and not self._started):
            self._give_up()
        elif self._reader.is_done:
            self._block, self._state = "", _State.BETWEEN
        return rest

    def _is_known(self) -> bool:
        """Whether this is a call for certain: named, its arguments begun or not to come."""
        reader = self._reader
        if reader.name is None or not (self._tagged or reader.name in self._names):
            return False
        return self._started or reader.arguments != "" or reader.is_done

    def _tell_call(self) -> None:
        arguments = self._reader.arguments
        if self._reader.is_done and not arguments:
            arguments = "{}"  # a call without arguments
        new, self._num_arguments = arguments[self._num_arguments :], len(arguments)
        if not self._started:
            self._started, self._space = True, ""
            self._events.append(CallDelta(self.num_calls, self._reader.name, new))
            self.num_calls += 1
        elif new:
            self._events.append(CallDelta(self.num_calls - 1, None, new))

    def _give_up(self) -> None:
        """No call after all: what was read of it is text, and so is what follows (until the next tag)."""
        block, self._block = self._block, ""
        self._state = _State.TEXT if self._tagged else _State.PLAIN
        self._started = False
        self._tell_text(block)

    def _tell_text(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._events.append(TextDelta(body))
