"""A model's fingerprint on the wire. Knows both spellings, decides nothing."""

from typing import Final

from shoal.errors import Mismatch
from shoal.pb.internal.v1 import worker_pb2
from shoal.types import DType, Fingerprint

MAX_TEXT_CHARACTERS: Final = 1024  # of a field: what differs is quoted and logged


def fingerprint_to_pb(fingerprint: Fingerprint) -> worker_pb2.Fingerprint:
    """The same fields; both spellings have the same names."""
    values = {name: getattr(fingerprint, name) for name in _NAMES}
    return worker_pb2.Fingerprint(dtype=str(fingerprint.dtype), **values)


def fingerprint_from_pb(message: worker_pb2.Fingerprint) -> Fingerprint:
    """Raises Mismatch when the peer's dtype is one this build does not know, or a text too long to be quoted."""
    values = {name: getattr(message, name) for name in _NAMES}
    for name, value in (*values.items(), ("dtype", message.dtype)):
        if isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS:
            raise Mismatch(f"the peer's {name} has more than {MAX_TEXT_CHARACTERS} characters")
    return Fingerprint(dtype=parse_dtype(message.dtype), **values)


def parse_dtype(text: str) -> DType:
    """Raises Mismatch for an element type this build does not know."""
    try:
        return DType(text)
    except ValueError:
        raise Mismatch(f"the peer's dtype {text!r} is unknown here; known: {', '.join(DType)}; run one release") from None


_NAMES: Final = tuple(field.name for field in worker_pb2.Fingerprint.DESCRIPTOR.fields if field.name != "dtype")
