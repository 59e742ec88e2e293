"""Pair channels on Gloo, for CPU tensors. Knows torch's Gloo group; knows no order checks and no protocol.

One process group object per pair, no global world. The tag is always 0: messages match by order, as they would on NCCL.
"""

import functools
import hmac
import secrets
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.errors import Unavailable
from shoal.kv_transfer.channel import PairChannel, Pending, PointToPoint, check_buffer
from shoal.kv_transfer.rendezvous import first_line

_TAG = 0
_PROOF_BYTES = 16


@functools.cache
def gloo_device(host: str) -> dist.ProcessGroupGloo.Device:
    """The process's one Gloo device on an interface; pairs share its thread."""
    return dist.ProcessGroupGloo.create_device(hostname=host)


class _Addresses(Store):
    """What Gloo sees of a pair's store. It reads on behind the end of an address that is too short, into whatever memory is
    there, and may crash the process; so the peer's must be as long as ours.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._num_bytes = 0  # of our address

    def set(self, key: str, value: str | bytes) -> None:
        self._num_bytes = len(value)
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes, though torch's stub says text

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        if len(value) != self._num_bytes:
            raise Unavailable(f"the pair could not be made: the peer's address has {len(value)} bytes, ours {self._num_bytes}")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)


class GlooChannel(PairChannel):
    """One end of a Gloo pair. Construction blocks until the other end is there or `timeout_s` has passed (Unavailable)."""

    def __init__(self, store: Store, rank: int, host: str, timeout_s: float) -> None:
        self._peer = 1 - rank
        self._addresses = _Addresses(store)  # kept for the group: its own reference does not keep a Python object alive
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        options._devices = [gloo_device(host)]
        try:
            self._group: PointToPoint | None = cast(PointToPoint, dist.ProcessGroupGloo(self._addresses, rank, 2, options))
        except (RuntimeError, ValueError, MemoryError) as error:  # the latter two: what a damaged address costs
            raise Unavailable(f"the pair could not be made: {first_line(error)}") from error
        self._meet(store, rank, timeout_s)

    def post_recv(self, n: int, buffer: torch.Tensor) -> Pending:
        check_buffer(buffer)
        group = self._open_group()
        try:
            return _Pending(group.recv([buffer], self._peer, _TAG), buffer.numel(), f"receive {n}")
        except RuntimeError as error:
            raise Unavailable(f"receive {n} could not be posted: {first_line(error)}") from error

    def send(self, n: int, buffer: torch.Tensor) -> Pending:
        check_buffer(buffer)
        group = self._open_group()
        try:
            return _Pending(group.send([buffer], self._peer, _TAG), buffer.numel(), f"send {n}")
        except RuntimeError as error:
            raise Unavailable(f"send {n} could not be issued: {first_line(error)}") from error

    def abort(self) -> None:
        """Gloo's abort does not wake waiters: an idle receive fails with the connection, a torn one by its timeout."""

    def close(self) -> None:
        self._group = None

    def _meet(self, store: Store, rank: int, timeout_s: float) -> None:
        """Each end sends over the channel what it has said through the store.

        Gloo takes whoever connects and names a pair's number, and the numbers are counted up: a stranger who came first would
        be sent the KV. It has not heard the store, though.
        """
        mine, theirs = secrets.token_bytes(_PROOF_BYTES), torch.zeros(_PROOF_BYTES, dtype=torch.uint8)
        store.set(f"proof/{rank}", mine.hex())
        expected = store.get(f"proof/{self._peer}")
        receive = self.post_recv(0, theirs)
        send = self.send(0, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        receive.wait(timeout_s)
        send.wait(timeout_s)
        if not hmac.compare_digest(bytes(theirs.numpy()).hex().encode(), expected):
            self.close()
            raise Unavailable("the pair could not be made: somebody else has answered on the channel in the peer's place")

    def _open_group(self) -> PointToPoint:
        if self._group is None:
            raise Unavailable("the pair has been closed")
        return self._group


class _Pending:
    """A Gloo work. `is_completed` stays False until `wait`, so somebody always waits."""

    def __init__(self, work: dist.Work, num_bytes: int, what: str) -> None:
        self._work = work
        self._num_bytes = num_bytes
        self._what = what

    def wait(self, timeout_s: float) -> int:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise Unavailable(f"{self._what} failed: {first_line(error)}") from error
        return self._num_bytes
