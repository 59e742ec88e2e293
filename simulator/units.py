"""Reads quantities with units as people write them. Knows spellings and factors; knows no models and no hardware.

Networks count in bits and in thousands (100gbe, 100Gb/s), memory rates in bytes and in thousands (3350GB/s), token counts in
1,024s (32k = 32,768, as context lengths are named).
"""

import math
import re
from collections.abc import Mapping

from shoal.errors import InvalidConfig

_QUANTITY = re.compile(r"\s*([-+]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(.*?)\s*\Z", re.IGNORECASE)
_TOKENS = {"": 1, "k": 1024, "m": 1024**2, "tokens": 1}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_PER_SECOND = {"": 1.0, "/s": 1.0, "req/s": 1.0, "/min": 1 / 60, "/h": 1 / 3600}


def parse_tokens(text: str) -> int:
    """A token count: `4096`, `4_096`, `32k` (= 32,768), `1m`. Raises InvalidConfig; at least 1."""
    value = _scaled(text, _TOKENS, "a token count such as 4096 or 32k")
    if value != int(value):
        raise InvalidConfig(f"{text!r} is not a whole number of tokens")
    return int(_positive(value, text, "a token count"))


def parse_seconds(text: str, *, allow_zero: bool = False) -> float:
    """A time: `250ms`, `1.5s`, `2min`. Raises InvalidConfig."""
    value = _scaled(text, _SECONDS, "a time with a unit, such as 250ms or 1.5s")
    return value if allow_zero and value == 0 else _positive(value, text, "a time")


def parse_rate(text: str) -> float:
    """Requests per second: `5.5`, `5.5/s`, `300/min`. Raises InvalidConfig for zero and less."""
    return _positive(_scaled(text, _PER_SECOND, "a request rate such as 5.5/s"), text, "a request rate")


def parse_bandwidth(text: str) -> float:
    """Bytes per second: `100gbe`, `100Gb/s`, `25Gbps` (bits), `12.5GB/s` (bytes). Raises InvalidConfig; a unit is needed."""
    number, unit = _split(text, "a bandwidth such as 100gbe, 100Gb/s or 12.5GB/s")
    if unit.lower() in ("gbe", "ge"):
        return _positive(number * 1e9 / 8, text, "a bandwidth")
    match = re.fullmatch(r"([kmgtKMGT]?)i?([bB])(?:it|yte)?s?(/s|ps)", unit)
    if match is None:
        raise InvalidConfig(f"{text!r} is not a bandwidth; write 100gbe, 100Gb/s (bits) or 12.5GB/s (bytes)")
    factor = _PREFIXES[match[1].lower()] / (8 if match[2] == "b" else 1)
    return _positive(number * factor, text, "a bandwidth")


def _split(text: str, expected: str) -> tuple[float, str]:
    match = _QUANTITY.match(text)
    if match is None:
        raise InvalidConfig(f"{text!r} is not {expected}")
    number = float(match[1].replace("_", "").replace(",", ""))
    if not math.isfinite(number):
        raise InvalidConfig(f"{text!r} is not finite")
    return number, match[2]


def _scaled(text: str, factors: Mapping[str, float], expected: str) -> float:
    number, unit = _split(text, expected)
    if unit.lower() not in factors:
        raise InvalidConfig(f"{text!r}: unit {unit!r} makes no sense here; write {expected}")
    return number * factors[unit.lower()]


def _positive(value: float, text: str, what: str) -> float:
    if not value > 0:
        raise InvalidConfig(f"{text!r}: {what} must be more than zero")
    return value
