"""From what people write, in YAML or flags, to values: sizes, lists, addresses, choices. Knows types; knows no setting."""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from shoal.errors import InvalidConfig

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])i?)?b?\s*$", re.IGNORECASE)
_SIZE_STEPS = {None: 0, "k": 1, "m": 2, "g": 3, "t": 4}


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of one YAML file. Raises InvalidConfig when it cannot be read or is not a mapping."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InvalidConfig(f"{path} must hold one mapping of keys to values, as in 'prefill_workers: 2'")
    return values


def parse_size(text: str) -> int:
    """Bytes from '512MiB', '2G', '1048576'. Steps are 1,024. Raises InvalidConfig."""
    match = _SIZE.match(text)
    if match is None:
        raise InvalidConfig(f"cannot read {text!r} as a size; write bytes, or a number with KiB, MiB, GiB")
    number, unit = match.groups()
    size = float(number) * 1024 ** _SIZE_STEPS[unit.lower() if unit else None]
    if size > 1 << 60:
        raise InvalidConfig(f"{text[:40]!r} is more than any machine has")
    return int(size)


def parse_list(text: str) -> tuple[str, ...]:
    """'full, speed:22' → ('full', 'speed:22')."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def convert(source: str, name: str, value: Any, default: Any) -> Any:
    """The value of a key, in its default's type. Raises InvalidConfig that names source and key."""
    if name == "kv_memory" and isinstance(value, str):
        return parse_size(value)
    if isinstance(default, tuple):
        if isinstance(value, str):
            return parse_list(value)
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise InvalidConfig(f"{source}: {name} must be a list of texts, not {value!r}")
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, str) and isinstance(value, str):
        return value
    if type(value) is not type(default):
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(type(default), "a text")
        raise InvalidConfig(f"{source}: {name} must be {kind}, not {value!r}")
    return value


def read_section(source: str, name: str, values: Any, kind: type[Any], example: str) -> dict[str, Any]:
    """The values of one section, a mapping for the dataclass `kind`, each of its field's type. Raises InvalidConfig."""
    if not isinstance(values, Mapping):
        raise InvalidConfig(f"{source}: {name} must be a mapping, as in '{name}: {{{example}}}'")
    known = {item.name: item for item in dataclasses.fields(kind)}
    for key in values:
        if key not in known:
            raise InvalidConfig(f"{source}: unknown key '{name}.{key}'; {nearest(str(key), known)}")
    return {key: convert(source, f"{name}.{key}", value, known[key].default) for key, value in values.items()}


def read_address(name: str, text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises InvalidConfig."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidConfig(f"{name} must be HOST:PORT, as in 127.0.0.1:50051, not {text!r}")
    return host, int(port)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises InvalidConfig."""
    if value not in choices:
        raise InvalidConfig(f"{name} {value!r} is unknown; choose one of {', '.join(choices)}")


def nearest(name: str, known: Mapping[str, Any]) -> str:
    """What may have been meant by an unknown key, in words."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"


@contextmanager
def named(fields: str) -> Iterator[None]:
    """Errors of the block name these fields."""
    try:
        yield
    except InvalidConfig as error:
        raise InvalidConfig(f"{fields}: {error}") from None
