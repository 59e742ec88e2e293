"""Typed reads of a config.json's fields. Knows no field by name."""

import math
from collections.abc import Mapping
from typing import TypeAlias

from shoal.errors import InvalidConfig

Json: TypeAlias = Mapping[str, object]

_MAX_NUMBER = 2**31  # no count of a real model is larger


def number(config: Json, name: str, default: float | None = None) -> float:
    """A finite number. Raises InvalidConfig, here and below, when the field is something else, or absent without a default."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
        raise InvalidConfig(f"{name} should be a number, not {value!r:.100}")
    try:
        return float(value)
    except OverflowError:
        raise InvalidConfig(f"{name} is an integer of more than 308 digits, which cannot be meant") from None


def integer(config: Json, name: str, default: int | None = None) -> int:
    """A whole number that could be meant."""
    value = number(config, name, default)
    if value != int(value):
        raise InvalidConfig(f"{name} should be a whole number, not {value!r}")
    if abs(value) > _MAX_NUMBER:
        raise InvalidConfig(f"{name} is {value!r}; more than {_MAX_NUMBER} cannot be meant")
    return int(value)


def flag(config: Json, name: str, default: bool = False) -> bool:
    """True, false, or null for the default."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidConfig(f"{name} should be true or false, not {value!r}")
    return default if value is None else value


def ids(config: Json, name: str) -> tuple[int, ...]:
    """A token id, a list of them, or null for none."""
    value = config.get(name)
    found = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in found):
        raise InvalidConfig(f"{name} should be a token id or a list of them, not {value!r}")
    return tuple(found)


def object_of(config: Json, name: str) -> Json:
    """An object, or an empty one for null."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidConfig(f"{name} should be an object")
    return value
