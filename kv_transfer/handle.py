"""What prefill shows decode before a byte of KV moves, and its msgpack form. Knows neither sockets nor tensors.

A handle that comes off the wire is hostile until every field has been checked for its type and size. Nothing is ever unpickled.
"""

from dataclasses import dataclass, fields
from typing import get_type_hints

import msgpack

from shoal.errors import InvalidRequest, Mismatch
from shoal.rpc.fingerprints import parse_dtype
from shoal.types import DType, Fingerprint

_VERSION = 1
_MAX_BYTES = 16 << 10
_MAX_TEXT = 1 << 10
_MAX_COUNT = 1 << 40


@dataclass(frozen=True, slots=True)
class Handle:
    """Identity of one transfer: both ends compute it, `Open` carries it, decode compares every field."""

    attempt_id: str
    fingerprint: Fingerprint
    visibility: str  # resolved text form
    num_prompt_tokens: int  # N
    num_cached_tokens: int  # c
    plan_digest: str

    def encode(self) -> bytes:
        """A msgpack array: version, own fields in order, then the fingerprint's fields in order."""
        own = [getattr(self, name) for name in _OWN]
        shape = [str(value) if isinstance(value, DType) else value for value in _values(self.fingerprint)]
        packed: bytes = msgpack.packb([_VERSION, own, shape], use_bin_type=True)
        return packed

    @classmethod
    def decode(cls, data: bytes) -> "Handle":
        """Raises InvalidRequest for anything but a well-formed handle, Mismatch for another version or an unknown dtype."""
        if len(data) > _MAX_BYTES:
            raise InvalidRequest(f"a handle has at most {_MAX_BYTES} bytes, not {len(data)}")
        try:
            parts = msgpack.unpackb(
                data,
                raw=False,
                max_str_len=_MAX_TEXT,
                max_bin_len=0,
                max_array_len=64,
                max_map_len=0,
                max_ext_len=0,
            )
        except (ValueError, UnicodeDecodeError, msgpack.exceptions.UnpackException) as error:
            raise InvalidRequest(f"the handle is not valid msgpack: {error}") from None
        if not isinstance(parts, list) or not parts:
            raise InvalidRequest("the handle is not a list")
        if parts[0] != _VERSION:
            raise Mismatch(f"handle version {parts[0]!r} from the peer, {_VERSION} here: run the same release in both pools")
        if len(parts) != 3 or not isinstance(parts[1], list) or not isinstance(parts[2], list):
            raise InvalidRequest("the handle must hold its version, its fields and a fingerprint")
        own = _checked(_OWN, parts[1])
        shape = _checked(_SHAPE, parts[2])
        return cls(fingerprint=Fingerprint(**{**shape, "dtype": parse_dtype(str(shape["dtype"]))}), **own)  # type: ignore[arg-type]

    def check_against(self, expected: "Handle") -> None:
        """Raises Mismatch that names each difference between this (prefill's) handle and decode's own."""
        differences = self.fingerprint.differences(expected.fingerprint) + [
            f"{name}: {getattr(self, name)} != {getattr(expected, name)}"
            for name in _OWN
            if getattr(self, name) != getattr(expected, name)
        ]
        if differences:
            raise Mismatch("the transfer does not fit its reservation (prefill != decode): " + "; ".join(differences))


_OWN: dict[str, type] = {name: kind for name, kind in get_type_hints(Handle).items() if kind in (str, int)}
_SHAPE: dict[str, type] = {name: str if kind is DType else kind for name, kind in get_type_hints(Fingerprint).items()}


def _values(fingerprint: Fingerprint) -> list[str | int]:
    return [getattr(fingerprint, field.name) for field in fields(fingerprint)]


def _checked(kinds: dict[str, type], values: list[object]) -> dict[str, str | int]:
    if len(values) != len(kinds):
        raise InvalidRequest(f"the handle has {len(values)} fields where {len(kinds)} belong")
    checked: dict[str, str | int] = {}
    for (name, kind), value in zip(kinds.items(), values, strict=True):
        if type(value) is not kind:  # also refuses bool where int belongs
            raise InvalidRequest(f"handle field {name} must be {kind.__name__}, not {type(value).__name__}")
        if isinstance(value, int) and not 0 <= value < _MAX_COUNT:
            raise InvalidRequest(f"handle field {name} is out of range: {value}")
        checked[name] = value  # type: ignore[assignment]
    return checked
