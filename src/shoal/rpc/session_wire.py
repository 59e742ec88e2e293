"""What both ends of a session do with envelopes: gather them into messages, carry metadata. Knows no call."""

from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

from shoal.pb.internal.v1 import session_pb2

_GATHER_BYTES: Final = 1 << 20  # one message's worth; a larger envelope goes alone


class _Sized(Protocol):
    def ByteSize(self) -> int: ...


Envelope = TypeVar("Envelope", bound=_Sized)


def gather(waiting: deque[Envelope]) -> list[Envelope]:
    """Take what fits into one message, at least one envelope."""
    if len(waiting) == 1:
        return [waiting.popleft()]
    taken: list[Envelope] = []
    num_bytes = 0
    while waiting and (not taken or num_bytes + waiting[0].ByteSize() <= _GATHER_BYTES):
        num_bytes += waiting[0].ByteSize()
        taken.append(waiting.popleft())
    return taken


def to_pb(metadata: Iterable[tuple[str, str | bytes]]) -> list[session_pb2.SessionMetadata]:
    """Text alone: nothing of ours travels as bytes."""
    return [session_pb2.SessionMetadata(name=name, value=value) for name, value in metadata if isinstance(value, str)]


def to_pairs(metadata: Iterable[session_pb2.SessionMetadata]) -> tuple[tuple[str, str], ...]:
    """As grpc.aio hands them out."""
    return tuple((each.name, each.value) for each in metadata)
