"""The pair channel: what Gloo and NCCL have in common, and nothing more. Knows tensors and order; knows no attempts and no plan.

Messages of a pair match by order, never by tag. A receive is posted before its send is issued, and both name the same number
of bytes: more bytes than the receive was posted for would abort the receiving process, fewer would pass unnoticed.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
import torch.distributed as dist

from shoal.errors import InternalError


class Pending(Protocol):
    """One issued send or receive. Its buffer belongs to the channel until `wait` has returned or raised."""

    def wait(self, timeout_s: float) -> int:
        """Block until the message has moved and return its bytes. Raises Unavailable; a timeout closes the pair for good."""
        ...


class PointToPoint(Protocol):
    """The part of torch's process groups that a pair uses; their own stubs leave it out."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work: ...


class PairChannel(ABC):
    """One end of a size-2 group. One thread issues, one waits; buffers are contiguous uint8 tensors of the message's size.

    `post_recv` and `send` raise Unavailable when the peer or the link is gone; nothing has been issued then.
    """

    @abstractmethod
    def post_recv(self, n: int, buffer: torch.Tensor) -> Pending:
        """Post the receive of message n into `buffer` [num_bytes] uint8. On return the peer may send."""

    @abstractmethod
    def send(self, n: int, buffer: torch.Tensor) -> Pending:
        """Issue the send of message n from `buffer` [num_bytes] uint8. The peer's receive has been posted."""

    @abstractmethod
    def abort(self) -> None:
        """From any thread: give every outstanding message up as far as the back end can. Waiters may still need their timeout."""

    @abstractmethod
    def close(self) -> None:
        """Tear this pair down alone, after every issued message has returned."""


class NoChannel(PairChannel):
    """Of a pair whose payload crosses no channel."""

    def post_recv(self, n: int, buffer: torch.Tensor) -> Pending:
        raise InternalError(f"message {n} was to be received on a pair without a channel")

    def send(self, n: int, buffer: torch.Tensor) -> Pending:
        raise InternalError(f"message {n} was to be sent on a pair without a channel")

    def abort(self) -> None:
        """Nothing is ever outstanding."""

    def close(self) -> None:
        """There is nothing to tear down."""


def check_buffer(buffer: torch.Tensor) -> None:
    """Raises ValueError unless the tensor can be handed to a back end as it is."""
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or not buffer.numel():
        raise ValueError("a message buffer is a contiguous, non-empty, one-dimensional uint8 tensor")
