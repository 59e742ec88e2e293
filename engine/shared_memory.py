"""Memory that one worker writes and others of the same user on the same machine read, without a socket in between (Linux).

The owner makes an anonymous file (memfd), sealed so that it can never shrink under a reader. A reader finds it through the
owner's /proc entry, which the kernel opens to the same user only, and knows it by a secret of 32 bytes that it was told over
an authenticated stream. It maps the memory read-only.

A reader may be slow, or stopped for a while, and the owner does not wait for it: it takes memory back by ending a *lease*.
Whoever reads checks the lease afterwards; only if it still holds was what he read the owner's.
"""

import fcntl
import os
import secrets
import stat
import sys
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config.memory import usable_memory_bytes
from shoal.engine.mapped_file import LARGE_PAGE_BYTES, gather_large_pages, map_file
from shoal.errors import InvalidConfig, Mismatch

_HEADER_BYTES: Final = LARGE_PAGE_BYTES  # so that the data begins at a large page
_SECRET_BYTES: Final = 32
_FIRST_LEASE: Final = 64
_NUM_LEASES: Final = 1 << 16
_SEALS: Final = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a reader finds the memory."""

    pid: int
    descriptor: int
    num_bytes: int  # of the data
    secret: bytes


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to believe what is read, until the owner ends it."""

    slot: int
    number: int  # of all that the slot has had


class SharedMemory:
    """The owner's end, used by one thread. The memory lives as long as a tensor over it, the offer as long as this object."""

    def __init__(self, num_bytes: int) -> None:
        """Raises InvalidConfig where there is no such memory."""
        if not sys.platform.startswith("linux"):
            raise InvalidConfig("transfer.backend 'shared-memory' needs Linux; choose 'gloo'")
        usable_bytes, whose = usable_memory_bytes()
        if num_bytes > usable_bytes:  # the kernel gives a file any size, and ends the process that fills it
            raise _unavailable(num_bytes, f"{whose} has {usable_bytes / 1e9:.1f} GB")
        try:
            self._descriptor = os.memfd_create("shoal-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, _HEADER_BYTES + num_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            memory = map_file(self._descriptor, _HEADER_BYTES + num_bytes, writable=True)
        except OSError as error:
            raise _unavailable(num_bytes, str(error)) from error
        self.has_large_pages = gather_large_pages(memory)
        secret = secrets.token_bytes(_SECRET_BYTES)
        memory[:_SECRET_BYTES] = secret
        self.data = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES)  # [num_bytes]
        if not self.has_large_pages:
            self.data.zero_()  # to have the small pages now, not in a request's time
        self.offer = Offer(os.getpid(), self._descriptor, num_bytes, secret)
        self._leases = _leases(memory)
        self._free = list(range(_NUM_LEASES - 1, -1, -1))
        self._num_given = 0

    @property
    def num_leases(self) -> int:
        """Leases that hold."""
        return _NUM_LEASES - len(self._free)

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)

    def lease(self) -> Lease:
        """A new one. There are more than requests can be open."""
        self._num_given += 1
        lease = Lease(self._free.pop(), self._num_given)
        self._leases[lease.slot] = lease.number
        return lease

    def end(self, lease: Lease) -> None:
        """From now on nobody believes what he reads under it. Idempotent."""
        if self._leases[lease.slot] == lease.number:
            self._leases[lease.slot] = 0
            self._free.append(lease.slot)


class MappedMemory:
    """A reader's end; unmapped with the last tensor over it."""

    def __init__(self, offer: Offer) -> None:
        """Raises Mismatch when this process cannot read it: another machine, user or process namespace."""
        try:
            descriptor = os.open(f"/proc/{offer.pid}/fd/{offer.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _cannot(error.strerror or "it cannot be opened") from None
        try:
            memory = _checked(descriptor, offer)
        except OSError as error:  # no file that can be sealed, or mapped
            raise _cannot(error.strerror or "it cannot be mapped") from None
        finally:
            os.close(descriptor)
        self.data = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES)  # [num_bytes]
        self._leases = _leases(memory)

    def holds(self, lease: Lease) -> bool:
        """Whether what has been read under a lease may be believed."""
        return lease.number > 0 and 0 <= lease.slot < _NUM_LEASES and int(self._leases[lease.slot]) == lease.number


def _checked(descriptor: int, offer: Offer) -> memoryview:
    found = os.fstat(descriptor)
    size = _HEADER_BYTES + offer.num_bytes
    if not stat.S_ISREG(found.st_mode) or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise _cannot("it is not sealed")  # a file that shrinks under a mapping kills whoever reads it
    if found.st_size != size or offer.num_bytes < 1:
        raise _cannot(f"it has {found.st_size} bytes, not {size}")
    memory = map_file(descriptor, size, writable=False)
    if not secrets.compare_digest(bytes(memory[:_SECRET_BYTES]), offer.secret):
        raise _cannot("it is another process's")
    return memory


def _leases(memory: memoryview) -> NDArray[np.uint64]:
    return np.frombuffer(memory, np.uint64, _NUM_LEASES, _FIRST_LEASE)


def _unavailable(num_bytes: int, why: str) -> InvalidConfig:
    return InvalidConfig(f"{num_bytes / 1e9:.1f} GB of shared memory cannot be had: {why}; lower kv_memory")


def _cannot(why: str) -> Mismatch:
    return Mismatch(
        f"transfer.backend shared-memory: the prefill worker's memory cannot be read here ({why}); both workers must run on one "
        "machine, as one user and in one process namespace; else use gloo"
    )
