"""Many steps of an unchanged batch as one piece of arithmetic. Knows times; knows no requests beyond their chunks."""

import math
from dataclasses import dataclass

from shoal.placement.batching import Chunk


@dataclass(slots=True)
class Burst:
    """`num_steps` equal steps but for the KV they read: step i takes base_s + slope_s · i."""

    start_s: float
    base_s: float
    slope_s: float
    num_steps: int
    chunks: tuple[Chunk, ...]

    def seconds(self, num_steps: int) -> float:
        """Time of the first `num_steps` steps."""
        return num_steps * self.base_s + self.slope_s * num_steps * (num_steps - 1) / 2

    def steps_begun(self, now: float) -> int:
        """Steps that have begun by `now`, at least 1."""
        elapsed = now - self.start_s
        if self.slope_s <= 1e-15:
            guess = int(elapsed / self.base_s) + 1
        else:
            half = self.base_s - self.slope_s / 2
            guess = int((math.sqrt(half * half + 2 * self.slope_s * elapsed) - half) / self.slope_s) + 1
        while guess > 1 and self.seconds(guess - 1) > elapsed:
            guess -= 1
        while self.seconds(guess) < elapsed:
            guess += 1
        return max(1, guess)
