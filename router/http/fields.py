"""Reads a JSON object field by field, strictly typed. Knows JSON; knows no parameter. A null field counts as absent."""

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NoReturn, TypeVar

from shoal.errors import InvalidRequest
from shoal.router.http.errors import BadField

Value = TypeVar("Value")
# JSON text whose escapes of UTF-16 surrogates all come in pairs
_WHOLE_CHARACTERS: Final = re.compile(
    r"(?:[^\\]++|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\(?!u[dD][89a-fA-F]).)*+",
    re.DOTALL,
)
_MAX_NAME: Final = 64  # characters of an unknown field: what is compared and told
_NAMES: Final = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "an integer", float: "a number"}


def parse_json(body: bytes) -> Any:
    """The value. Raises InvalidRequest that names the place: a byte for UTF-8, line and column for JSON."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise InvalidRequest("the body is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits, a constant that is no JSON
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not _WHOLE_CHARACTERS.fullmatch(text):
        raise InvalidRequest("the body has half of a character: a \\ud800…\\udfff escape without its other half")
    return value


def dump_json(value: Any) -> str:
    """JSON without spare white space."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dump_field(value: Any, where: str) -> str:
    """The same of a part of the body. Raises BadField for what was read but cannot be written: 1e400, deep nesting."""
    try:
        return dump_json(value)
    except (ValueError, RecursionError) as error:
        raise BadField(where, f"{where} cannot be written as JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


class Fields:
    """One object of the body. Each reader returns None for an absent or null field and raises BadField that names it."""

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise BadField(where or "body", f"{where or 'the body'} must be an object, not {kind_of(value)}")
        self._value = {name: entry for name, entry in value.items() if entry is not None}
        self._where = where

    @property
    def names(self) -> Collection[str]:
        return self._value.keys()

    def path(self, name: str) -> str:
        """What the field is called in messages."""
        return f"{self._where}.{name}" if self._where else name

    def raw(self, name: str) -> Any:
        return self._value.get(name)

    def text(self, name: str) -> str | None:
        return self._typed(name, str)

    def flag(self, name: str) -> bool | None:
        return self._typed(name, bool)

    def integer(self, name: str, low: int, high: int, *, bounded: bool = True) -> int | None:
        """A whole number in low…high. `bounded` says that `high` is a limit worth telling, not just what fits the field."""
        value = self._value.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, f"must be an integer, not {kind_of(value)}")
        if not low <= value <= high:
            said = str(value) if abs(value) < 1 << 64 else "a number of that size"
            self.refuse(name, f"must {f'lie in {low}…{high}' if bounded or value > high else f'be at least {low}'}, not {said}")
        return value

    def number(self, name: str) -> float | None:
        """A finite number that a 32-bit float can hold."""
        value = self._value.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, f"must be a number, not {kind_of(value)}")
        if not abs(value) <= 3.4e38:  # NaN is not
            self.refuse(name, "must be a finite number")
        return float(value)

    def array(self, name: str) -> list[Any] | None:
        return self._typed(name, list)

    def nested(self, name: str) -> "Fields | None":
        value = self._value.get(name)
        return None if value is None else Fields(value, self.path(name))

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """A free-form object."""
        return self._typed(name, dict)

    def choice(self, name: str, values: Collection[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in values:
            self.refuse(name, f"must be one of {', '.join(values)}, not {value!r}")
        return value

    def texts(self, name: str) -> list[str] | None:
        """One text or a list of texts."""
        value = self._value.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            self.refuse(name, f"must be a text or a list of texts, not {kind_of(value)}")
        for index, entry in enumerate(value):
            if not isinstance(entry, str):
                self.refuse(f"{name}[{index}]", f"must be a text, not {kind_of(entry)}")
        return value

    def ids(self, name: str) -> list[int] | None:
        """A list of token ids."""
        value = self.array(name)
        return None if value is None else check_ids(value, self.path(name))

    def need(self, value: Value | None, name: str) -> Value:
        """The value of a field that must be there."""
        if value is None:
            self.refuse(name, "is missing")
        return value

    def check_known(self, known: Collection[str]) -> None:
        """Refuse fields that nobody reads, as OpenAI does, with the nearest name that is."""
        for name in self._value:
            if name not in known:
                name = f"{name[:_MAX_NAME]}…" if len(name) > _MAX_NAME else name
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise BadField(self.path(name), f"unknown field {self.path(name)}{hint}")

    def refuse(self, name: str, why: str) -> NoReturn:
        raise BadField(self.path(name), f"{self.path(name)} {why}")

    def _typed(self, name: str, kind: type[Value]) -> Value | None:
        value = self._value.get(name)
        if value is not None and not isinstance(value, kind):
            self.refuse(name, f"must be {_NAMES[kind]}, not {kind_of(value)}")
        return value


def check_ids(value: list[Any], where: str) -> list[int]:
    """Token ids as they stand. Raises BadField that names the entry."""
    for index, entry in enumerate(value):
        if isinstance(entry, bool) or not isinstance(entry, int) or not 0 <= entry < 1 << 32:
            what = entry if isinstance(entry, int) and not isinstance(entry, bool) else kind_of(entry)
            raise BadField(where, f"{where}[{index}] must be a token id, not {what}")
    return value


def kind_of(value: Any) -> str:
    """A JSON value's type in words."""
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)
