"""Whether a worker that is full or busy has stopped moving. Knows counts and the time it is told; no worker.

Full is well: requests wait, and blocks come free. Ill is a worker where, for `patience_s`,

- no block was freed and no step ended, and
- requests stand in its batch (a step should have ended), or wait for blocks while none that holds some is being transferred
  (nobody is left who could free them). While one is, its peer's heartbeat and its lease bound the wait instead.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """One look at a worker. `num_moves` only grows: steps ended and requests that gave their blocks back."""

    num_moves: int
    num_running: int
    num_waiting: int
    num_transferring: int

    @property
    def should_move(self) -> bool:
        return self.num_running > 0 or (self.num_waiting > 0 and self.num_transferring == 0)


class StallWatch:
    """`is_ill` is asked again and again."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._num_moves = -1
        self._still_since = 0.0

    def is_ill(self, standing: Standing, now: float) -> bool:
        """Whether it should have moved since `patience_s` and did not."""
        if standing.num_moves != self._num_moves or not standing.should_move:
            self._num_moves, self._still_since = standing.num_moves, now
        return now - self._still_since >= self._patience_s
