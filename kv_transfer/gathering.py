"""What of one transfer is complete, and when it is worth a message. Knows entries and one buffer; knows no pair and no stream.

While a step runs, its transfer may hold one staging buffer. Entries are packed and summed in the step's own thread, all of a
message's at once: a step that stopped at each layer for it would find nothing of this program in the caches any more, which
costs the core that computes more than reading the entries from memory. Without a buffer, the pair's lane packs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, Protocol

import torch

from shoal.errors import ShoalError
from shoal.kv_transfer.guard import Guard
from shoal.placement.plan import Entry, EntryKind, TransferPlan

Copy = Callable[[Entry, torch.Tensor], None]
_WORTH_BYTES: Final = 1 << 20  # read in the time that one announcement takes, by a receiver that reads where they lie


class Filled(Protocol):
    """Where a buffer goes: its ticket, what lies in it, and the checksums; None: it could not be filled, `error` says why."""

    def __call__(self, ticket: int, entries: Sequence[Entry], crcs: Sequence[int] | None, error: ShoalError | None) -> None: ...


@dataclass(slots=True)
class _Buffer:
    ticket: int
    memory: torch.Tensor  # [n] uint8
    entries: list[Entry] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)
    num_bytes: int = 0

    def takes(self, entry: Entry) -> bool:
        follows = not self.entries or entry.index == self.entries[-1].index + 1
        return follows and self.num_bytes + entry.num_bytes <= self.memory.numel()


class Gathering:
    """Of one transfer. Thread-safe; `filled` and `ready` are called under its lock and must return at once."""

    def __init__(
        self,
        plan: TransferPlan,
        guard: Guard,
        copy: Copy,
        max_gathered_bytes: int,
        *,
        in_place: bool = False,
        filled: Filled,
        ready: Callable[[Sequence[int]], None],
    ) -> None:
        """`in_place`: the receiver reads entries where they lie, so that a message holds no buffer and may have any size."""
        self._in_place = in_place
        self._plan = plan
        self._guard = guard
        self._copy = copy
        self._max_gathered_bytes = max_gathered_bytes
        self._filled = filled
        self._ready = ready
        self._lock = Lock()
        self._complete: list[int] = []  # entries that lie in no buffer yet
        self._num_complete_bytes = 0  # of these, and of those in the buffer
        self._num_missing_bytes = plan.num_bytes
        self._largest_bytes = max(entry.num_bytes for entry in plan.entries)
        self._last_layer = max((entry.layer for entry in plan.entries if entry.kind is EntryKind.KV), default=0)
        # missing below the last layer
        self._num_early_bytes = sum(entry.num_bytes for entry in plan.entries if self._is_early(entry))
        self._buffer: _Buffer | None = None
        self._in_step = False

    @property
    def takes_buffer(self) -> bool:
        """Whether a step is running that can fill one."""
        return self._in_step and self._buffer is None and self._num_missing_bytes > 0

    def begin_step(self) -> None:
        """A step is about to complete entries."""
        with self._lock:
            self._in_step = True

    def offer(self, ticket: int, memory: torch.Tensor) -> bool:
        """Lend a buffer for this step. False, and it is not taken, when the step has ended meanwhile."""
        with self._lock:
            if not self.takes_buffer:
                return False
            self._buffer = _Buffer(ticket, memory)
            return True

    def complete(self, indices: Sequence[int]) -> None:
        """These entries' bytes exist. What is complete goes once it is worth a message.

        A message costs both ends some control, whatever its size; what a caller waits for is the last ones. So messages shrink
        towards the end of the plan, each at least two thirds of what is left, and nothing waits for the last layer.
        """
        if not indices:
            return
        with self._lock:
            entries = [self._plan.entries[index] for index in indices]
            num_bytes = sum(entry.num_bytes for entry in entries)
            self._complete.extend(indices)
            self._num_complete_bytes += num_bytes
            self._num_missing_bytes -= num_bytes
            self._num_early_bytes -= sum(entry.num_bytes for entry in entries if self._is_early(entry))
            if not self._in_place:
                self._pack()
            if self._is_due():
                self._hand_over()

    def is_worth(self, num_bytes: int) -> bool:
        """Whether a message would leave if so many bytes more were complete: so long a step need not stop to tell of them."""
        with self._lock:
            return self._is_due(num_bytes)

    def end_step(self) -> None:
        """The step is over: whatever is complete goes, and no buffer stays here. What is read in place waits for more."""
        with self._lock:
            self._in_step = False
            if self._in_place:
                return
            self._hand_over()
            if self._complete:
                self._hand_over()
            if self._buffer is not None:
                self._give_back(None)

    def withdraw(self) -> None:
        """The transfer has ended, its guard is closed: give the buffer back."""
        with self._lock:
            self._in_step = False
            self._complete.clear()
            if self._buffer is not None:
                self._give_back(None)

    def _is_due(self, num_more_bytes: int = 0) -> bool:
        num_complete, num_missing = self._num_complete_bytes + num_more_bytes, self._num_missing_bytes - num_more_bytes
        if self._in_place:
            is_most = num_complete >= 4 * num_missing  # read far faster than it is computed
            return num_missing == 0 or (is_most and num_missing >= _WORTH_BYTES)
        is_most = num_complete >= 2 * num_missing
        is_full = num_complete + self._largest_bytes > self._max_gathered_bytes
        return is_full or self._num_early_bytes <= num_more_bytes or is_most

    def _is_early(self, entry: Entry) -> bool:
        return entry.kind is EntryKind.KV and entry.layer < self._last_layer

    def _pack(self) -> None:
        """Into the buffer, as far as what is complete follows what lies there."""
        num_packed = 0
        for index in self._complete:
            entry, buffer = self._plan.entries[index], self._buffer
            if buffer is None or not buffer.takes(entry):
                break
            part = buffer.memory[buffer.num_bytes : buffer.num_bytes + entry.num_bytes]
            try:
                crcs = self._guard.copy(self._copy, (entry,), part)
            except ShoalError as error:
                self._give_back(error)
                break
            if crcs is None:
                self._give_back(None)
                break
            buffer.entries.append(entry)
            buffer.crcs += crcs
            buffer.num_bytes += entry.num_bytes
            num_packed += 1
        del self._complete[:num_packed]

    def _hand_over(self) -> None:
        """The buffer goes, and what did not fit waits for the next one; where there is none, the lane has to pack."""
        if self._buffer is not None and self._buffer.entries:
            buffer, self._buffer = self._buffer, None
            self._num_complete_bytes -= buffer.num_bytes
            self._filled(buffer.ticket, buffer.entries, buffer.crcs, None)
        elif self._complete:
            self._ready(sorted(self._complete))  # layer by layer where much was cached, but a message holds neighbours
            self._complete, self._num_complete_bytes = [], 0

    def _give_back(self, error: ShoalError | None) -> None:
        assert self._buffer is not None
        ticket, self._buffer = self._buffer.ticket, None
        self._filled(ticket, (), None, error)
