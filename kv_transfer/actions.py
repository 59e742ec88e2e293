"""What the two state machines of a pair ask their drivers to do. Plain data: knows no streams, threads or tensors."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import ShoalError
from shoal.pb.internal.v1 import transfer_pb2
from shoal.placement.plan import Entry, entries_bytes


@dataclass(frozen=True, slots=True)
class Write:
    """Put a message on the control stream."""

    message: transfer_pb2.SenderMessage | transfer_pb2.ReceiverMessage


@dataclass(frozen=True, slots=True)
class WantBuffer:
    """Ask for one staging buffer (the receiver: with a place to receive); answered by `granted`. One request at a time."""


@dataclass(frozen=True, slots=True)
class ReturnBuffer:
    """The buffer just granted is not needed after all."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Sender: pack entries, one behind the other, into the buffer just granted, which becomes the buffer of `ticket`.

    Answered by `packed`.
    """

    ticket: int
    attempt_id: str
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        return entries_bytes(self.entries)


@dataclass(frozen=True, slots=True)
class Issue:
    """Sender: send message n from the buffer of `ticket`. Answered by `sent`."""

    ticket: int
    n: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Post:
    """Receiver: post the receive of message n into the buffer just granted, the buffer of `n` from now on.

    Answered by `posted`, `arrived` and `unpacked`, or by `failed`.
    """

    n: int
    attempt_id: str
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        return entries_bytes(self.entries)


@dataclass(frozen=True, slots=True)
class FreeBuffer:
    """The buffer of a ticket (sender) or message (receiver) is free again."""

    key: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The buffer's attempt has ended, but its message has not returned: count it, do not free it."""

    key: int


@dataclass(frozen=True, slots=True)
class Finish:
    """An attempt has ended: with its Ack (error None) or without. Emitted once per attempt; its blocks may be freed."""

    attempt_id: str
    error: ShoalError | None
    payload_bytes: int
    header_bytes: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """Both ends agree on the attempt; this pair carries it from now on."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Receiver: so many bytes were ready but no longer wanted."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Receiver: an Open was refused."""

    error: ShoalError


@dataclass(frozen=True, slots=True)
class ClosePair:
    """The peer broke the protocol: tell it why, and close."""

    error: ShoalError


Action = (
    Write
    | WantBuffer
    | ReturnBuffer
    | Pack
    | Issue
    | Post
    | FreeBuffer
    | Quarantine
    | Finish
    | Accepted
    | Skipped
    | Rejected
    | ClosePair
)


def combine_checksums(crcs: Sequence[int]) -> int:
    """The Trailer's checksum: CRC-32 over the entries' CRC-32s, 4 bytes each, little-endian, in plan order."""
    return zlib.crc32(b"".join(crc.to_bytes(4, "little") for crc in crcs))
