"""Bounded staging: a fixed number of buffers per worker, granted fairly over pairs. Knows no messages; lives on the event loop.

A buffer is `free`, or `in use`, and while in use it may be `quarantined`: its attempt has ended, but a message that was issued
on it has not returned. Free + in use = total; nothing is allocated per message.
"""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from shoal.engine.kernels.memory import empty
from shoal.errors import InternalError
from shoal.kv_transfer import metrics


class Gate:
    """At most `capacity` holders at once; who waits is served round-robin, one request per key. Sans clock, sans threads."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.num_held = 0
        self._waiting: dict[Hashable, Callable[[], None]] = {}

    def request(self, key: Hashable, grant: Callable[[], None]) -> None:
        """Call `grant` once a place is free, perhaps at once. A key that already waits keeps its place in the queue."""
        self._waiting.setdefault(key, grant)
        self._pump()

    def try_hold(self, num_spare: int) -> bool:
        """Take a place at once, if nobody waits for one and so many stay free."""
        if self._waiting or (self.capacity is not None and self.num_held + num_spare >= self.capacity):
            return False
        self.num_held += 1
        return True

    def withdraw(self, key: Hashable) -> None:
        """Forget a request that has not been granted."""
        self._waiting.pop(key, None)

    def release(self) -> None:
        """Give one place back."""
        if self.num_held < 1:
            raise InternalError("a place was given back twice")
        self.num_held -= 1
        self._pump()

    def _pump(self) -> None:
        while self._waiting and (self.capacity is None or self.num_held < self.capacity):
            key = next(iter(self._waiting))
            grant = self._waiting.pop(key)
            self.num_held += 1
            grant()


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """One buffer; `view(n)` is the part a message of n bytes uses."""

    memory: torch.Tensor  # [buffer_bytes] uint8
    quarantined: bool = False

    def view(self, num_bytes: int) -> torch.Tensor:
        if not 0 < num_bytes <= self.memory.numel():
            raise InternalError(f"a message of {num_bytes} bytes does not fit a staging buffer of {self.memory.numel()}")
        return self.memory[:num_bytes]


class StagingPool:
    """`num_buffers` buffers of `buffer_bytes`, made on first use and kept."""

    def __init__(self, num_buffers: int, buffer_bytes: int, device: torch.device, end: str) -> None:
        self.num_buffers = num_buffers
        self.buffer_bytes = buffer_bytes
        self._device = device
        self._gate = Gate(num_buffers)
        self._free: deque[StagingBuffer] = deque()
        self._in_use: set[StagingBuffer] = set()
        self._used_bytes = metrics.STAGING.labels(end)
        self._quarantined_bytes = metrics.QUARANTINE.labels(end)

    @property
    def num_in_use(self) -> int:
        """Buffers that hold or await a message, quarantined ones included."""
        return len(self._in_use)

    @property
    def num_quarantined(self) -> int:
        """Buffers whose attempt has ended while an issued message has not returned."""
        return sum(buffer.quarantined for buffer in self._in_use)

    def request(self, key: Hashable, grant: Callable[[StagingBuffer], None]) -> None:
        """Call `grant(buffer)` once one is free, perhaps at once; one request per key at a time."""
        self._gate.request(key, lambda: grant(self._take()))

    def try_take(self, num_spare: int) -> StagingBuffer | None:
        """A buffer at once, if nobody waits for one and so many stay free; else None."""
        return self._take() if self._gate.try_hold(num_spare) else None

    def withdraw(self, key: Hashable) -> None:
        self._gate.withdraw(key)

    def quarantine(self, buffer: StagingBuffer) -> None:
        """Count a buffer as quarantined until it is released. Idempotent."""
        if not buffer.quarantined:
            buffer.quarantined = True
            self._quarantined_bytes.inc(self.buffer_bytes)

    def release(self, buffer: StagingBuffer) -> None:
        """Give a buffer back. Raises InternalError for one that is not in use."""
        if buffer not in self._in_use:
            raise InternalError("a staging buffer was given back twice")
        self._in_use.discard(buffer)
        self._used_bytes.dec(self.buffer_bytes)
        if buffer.quarantined:
            buffer.quarantined = False
            self._quarantined_bytes.dec(self.buffer_bytes)
        self._free.append(buffer)
        self._gate.release()

    def _take(self) -> StagingBuffer:
        # the last one used: it may still lie in the processor's cache
        buffer = self._free.pop() if self._free else StagingBuffer(self._make())
        self._in_use.add(buffer)
        self._used_bytes.inc(self.buffer_bytes)
        return buffer

    def _make(self) -> torch.Tensor:
        if self._device.type == "cpu":
            return empty((self.buffer_bytes,), torch.uint8)
        return torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self._device)


class Permits:
    """A place on the device (`slots`) together with a buffer: what posting one receive takes. Places are granted first."""

    def __init__(self, slots: Gate, staging: StagingPool) -> None:
        self._slots = slots
        self._staging = staging
        self._placed: set[Hashable] = set()  # keys that have a place and wait for a buffer

    def request(self, key: Hashable, grant: Callable[[StagingBuffer], None]) -> None:
        """Call `grant(buffer)` once place and buffer are free, perhaps at once; one request per key at a time."""

        def placed() -> None:
            self._placed.add(key)
            self._staging.request(key, buffered)

        def buffered(buffer: StagingBuffer) -> None:
            self._placed.discard(key)
            grant(buffer)

        self._slots.request(key, placed)

    def withdraw(self, key: Hashable) -> None:
        """Forget a request that has not been granted, and free the place it may hold."""
        self._slots.withdraw(key)
        self._staging.withdraw(key)
        if key in self._placed:
            self._placed.discard(key)
            self._slots.release()

    def release_place(self) -> None:
        """The message has come, or its pair was aborted: the next receive may be posted."""
        self._slots.release()

    def release_buffer(self, buffer: StagingBuffer) -> None:
        self._staging.release(buffer)
