"""Pair channels on NCCL, for CUDA tensors. Knows torch's NCCL group and its environment; knows no protocol.

Written to the same interface as Gloo and to torch's documentation; pairs have not been run, as two ranks cannot share one GPU.
NCCL ignores tags, matches in the order of issue, and a posted receive occupies its GPU until the message comes.
"""

import os
import threading
import time
from typing import cast

import torch
import torch.distributed as dist

from shoal.config.transfer import NCCL_ENVIRONMENT
from shoal.errors import InvalidConfig, Unavailable
from shoal.kv_transfer.channel import PairChannel, Pending, PointToPoint, check_buffer
from shoal.kv_transfer.rendezvous import PairStore, first_line

_POLL_S = 0.0002


def check_environment() -> None:
    """Raises InvalidConfig unless this process can survive the death of an NCCL peer."""
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        raise InvalidConfig("transfer.backend 'nccl' needs a CUDA device and a CUDA build of torch; choose 'gloo' on CPU")
    for name, value in NCCL_ENVIRONMENT.items():
        if name == "NCCL_MAX_NCHANNELS" and os.environ.get(name):
            continue
        if os.environ.get(name) != value:
            raise InvalidConfig(f"set {name}={value} before the worker starts: the NCCL backend depends on it")


class NcclChannel(PairChannel):
    """One end of an NCCL pair on `device`. Construction blocks until the other end is there (Unavailable)."""

    def __init__(self, store: PairStore, rank: int, device: torch.device) -> None:
        check_environment()
        self._store = store  # kept for the group
        torch.cuda.set_device(device)
        self._peer = 1 - rank
        self._lock = threading.Lock()
        self._aborted = False
        try:
            self._group: dist.ProcessGroupNCCL | None = dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
            self._group.eager_connect_single_device(device)
        except RuntimeError as error:
            raise Unavailable(f"the pair could not be made: {first_line(error)}") from error

    def post_recv(self, n: int, buffer: torch.Tensor) -> Pending:
        check_buffer(buffer)
        try:
            return _Pending(self, self._open_group().recv([buffer], self._peer, 0), buffer.numel(), f"receive {n}")
        except RuntimeError as error:
            raise Unavailable(f"receive {n} could not be posted: {first_line(error)}") from error

    def send(self, n: int, buffer: torch.Tensor) -> Pending:
        check_buffer(buffer)
        try:
            return _Pending(self, self._open_group().send([buffer], self._peer, 0), buffer.numel(), f"send {n}")
        except RuntimeError as error:
            raise Unavailable(f"send {n} could not be issued: {first_line(error)}") from error

    def abort(self) -> None:
        """Kills the kernels that wait for the peer: the GPU is free again, and every waiter returns."""
        with self._lock:
            if self._group is not None and not self._aborted:
                self._aborted = True
                self._group.abort()

    def close(self) -> None:
        self.abort()
        self._group = None

    def _open_group(self) -> PointToPoint:
        if self._group is None or self._aborted:
            raise Unavailable("the pair has been closed")
        return cast(PointToPoint, self._group)


class _Pending:
    """An NCCL work: `wait` would block only the CUDA stream, so completion is polled until the timeout."""

    def __init__(self, channel: NcclChannel, work: dist.Work, num_bytes: int, what: str) -> None:
        self._channel = channel
        self._work = work
        self._num_bytes = num_bytes
        self._what = what

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        try:
            while not self._work.is_completed():
                if time.monotonic() > deadline:
                    self._channel.abort()
                    raise Unavailable(f"{self._what} did not return within {timeout_s:.1f} s")
                time.sleep(_POLL_S)
            self._work.wait()
        except RuntimeError as error:
            raise Unavailable(f"{self._what} failed: {first_line(error)}") from error
        return self._num_bytes
