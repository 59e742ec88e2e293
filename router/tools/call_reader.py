"""Reads one call, `{"name": …, "arguments": …}`, character by character. Knows JSON's shape; knows no tool."""

import json
from enum import Enum, auto
from typing import Any, Final

_ARGUMENTS: Final = ("arguments", "parameters")  # Llama 3 says parameters


class _Expect(Enum):
    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()


class CallReader:
    """`name` and `arguments` grow as text comes; `arguments` is the JSON text as the model wrote it."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._arguments = ""
        self._expect = _Expect.OPEN
        self._key = ""
        self._token = ""  # of the key or value being read
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def arguments(self) -> str:
        """As far as read. Arguments that come as a string are known once it ends, and those before the name once that is."""
        if self._expect is _Expect.VALUE and self._key in _ARGUMENTS and self._token.startswith("{"):
            return self._token
        return self._arguments

    def feed(self, text: str) -> int:
        """Read up to the object's end; returns how many characters were taken."""
        for index, char in enumerate(text):
            if self.is_done or self.is_broken:
                return index
            self._read(char)
        return len(text)

    def _read(self, char: str) -> None:
        if self._in_string:
            self._read_string(char)
        elif char.isspace():
            if self._expect is _Expect.VALUE and self._depth > 1:
                self._token += char
        elif self._expect is _Expect.OPEN and char == "{":
            self._depth, self._expect = 1, _Expect.KEY
        elif self._expect is _Expect.KEY and char == '"':
            self._in_string, self._token = True, char
        elif self._expect is _Expect.KEY and char == "}":
            self.is_done = True
        elif self._expect is _Expect.COLON and char == ":":
            self._expect, self._token = _Expect.VALUE, ""
        elif self._expect is _Expect.VALUE:
            self._read_value(char)
        else:
            self.is_broken = True

    def _read_string(self, char: str) -> None:
        self._token += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._expect is _Expect.KEY:
                self._key, self._expect = str(self._load(self._token)), _Expect.COLON

    def _read_value(self, char: str) -> None:
        if self._depth == 1 and char in ",}":
            self._end_value()
            self.is_done = char == "}" and not self.is_broken
            return
        if char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_broken = self._depth < 1
        elif char == '"':
            self._in_string = True
        self._token += char

    def _end_value(self) -> None:
        token, self._token, self._expect = self._token, "", _Expect.KEY
        value = self._load(token)
        if self._key == "name":
            self.name = value if isinstance(value, str) else None
            self.is_broken |= not isinstance(value, str)
        elif self._key in _ARGUMENTS:
            self._arguments = value if isinstance(value, str) else token

    def _load(self, token: str) -> Any:
        try:
            return json.loads(token)
        except ValueError:
            self.is_broken = True
            return None
