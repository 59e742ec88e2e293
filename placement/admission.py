"""How long a request would wait for its start, and whether that is too long. Knows reports and rates; has no clock.

Two waits, on different workers, overlap for the most part, so the longer one counts:

- for **room** on a decode worker. Blocks come free at capacity / (mean time that requests hold theirs), by Little's law for a
  pool that is full, so what must come free before this request's turn takes (blocks over capacity) / capacity of that time; the
  same of places, where the number of holders is limited.
- for **compute** on a prefill worker: the token-layers ahead, at the pace of the steps it ran lately.

Where nothing is known yet (no step has run, nobody ever held blocks) the wait is 0: nobody is refused on a guess.
"""

import math
from dataclasses import dataclass
from typing import Final

from shoal.errors import CapacityExceeded
from shoal.types import Priority

_SPARE_WAIT_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class RoomReport:
    """What one decode worker holds, as it reported it and with what has been sent to it since.

    `waiting` is (requests, blocks they need) by class.
    """

    worker_id: str
    num_used_blocks: int
    num_total_blocks: int
    num_holders: int
    max_holders: int
    waiting: tuple[tuple[Priority, int, int], ...]
    mean_hold_s: float

    def ahead_of(self, priority: Priority) -> tuple[int, int]:
        """(Requests, blocks) that wait in this class and those above."""
        ahead = [entry for entry in self.waiting if entry[0].rank >= priority.rank]
        return sum(entry[1] for entry in ahead), sum(entry[2] for entry in ahead)

    def wait_s(self, priority: Priority, num_blocks: int) -> float:
        """Seconds until a request of this class that needs so many blocks has them; 0 for one that never fits."""
        if not 0 < num_blocks <= self.num_total_blocks or not self.max_holders:
            return 0.0
        num_requests, num_ahead = self.ahead_of(priority)
        over_blocks = self.num_used_blocks + num_ahead + num_blocks - self.num_total_blocks
        over_places = self.num_holders + num_requests + 1 - self.max_holders
        return self.mean_hold_s * max(0.0, over_blocks / self.num_total_blocks, over_places / self.max_holders)

    def has_spare(self, num_blocks: int) -> bool:
        """Whether a request that is nobody's may begin: it, all that waits and all that runs take half of the worker at most."""
        num_waiting, num_ahead = self.ahead_of(Priority.LOW)
        fits = 2 * (self.num_used_blocks + num_ahead + num_blocks) <= self.num_total_blocks
        return fits and 2 * (self.num_holders + num_waiting + 1) <= self.max_holders + 1

    def words(self, priority: Priority) -> str:
        """What is full."""
        num_requests, num_ahead = self.ahead_of(priority)
        return (
            f"decode worker {self.worker_id}: {self.num_used_blocks} of {self.num_total_blocks} KV blocks used, "
            f"{self.num_holders} of {self.max_holders} places taken, {num_requests} requests before it wait for {num_ahead}"
        )


@dataclass(frozen=True, slots=True)
class ComputeReport:
    """What one prefill worker has before it."""

    worker_id: str
    outstanding: tuple[tuple[Priority, int], ...]  # token-layers by class
    token_layers_per_s: float  # 0: not known

    def ahead_of(self, priority: Priority) -> int:
        """Token-layers of this class and those above."""
        return sum(token_layers for other, token_layers in self.outstanding if other.rank >= priority.rank)

    def wait_s(self, priority: Priority) -> float:
        """Seconds until what goes before a request of this class is computed."""
        return self.ahead_of(priority) / self.token_layers_per_s if self.token_layers_per_s > 0 else 0.0

    def has_spare(self) -> bool:
        """Whether a request that is nobody's may begin: it delays others by little, as they delay it."""
        return self.wait_s(Priority.LOW) <= _SPARE_WAIT_S

    def words(self, priority: Priority) -> str:
        """What is full."""
        return (
            f"prefill worker {self.worker_id}: {self.ahead_of(priority)} token-layers before it at "
            f"{self.token_layers_per_s:.0f} a second"
        )


@dataclass(frozen=True, slots=True)
class WaitBounds:
    """How long a request may be expected to wait: `max_wait_s` by the operator, `time_left_s` by its own deadline."""

    max_wait_s: float  # inf: no bound
    time_left_s: float

    @property
    def bound_s(self) -> float:
        return max(0.0, min(self.max_wait_s, self.time_left_s))  # without a wait nobody is refused: late is for others to say

    def refusal(self, wait_s: float, words: str) -> CapacityExceeded:
        """Why a request with this wait is refused, and when to come back: when the wait is predicted to be within the bound."""
        why = f"beyond the limit of {self.max_wait_s:g} s"
        if self.time_left_s < self.max_wait_s:
            why = f"later than its own deadline, {max(0.0, self.time_left_s):.1f} s from now"
        retry_after_s = max(1.0, math.ceil(wait_s - self.bound_s))
        return CapacityExceeded(
            f"no room now: the request would wait about {wait_s:.1f} s for its start, {why} ({words}); "
            f"retry in {retry_after_s:.0f} s",
            retry_after_s,
        )
