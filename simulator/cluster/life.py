"""Whether a simulated worker may be chosen, and how long it has been paid for. Knows times; decides nothing."""

from dataclasses import dataclass


@dataclass(slots=True)
class Life:
    """Times in seconds. A worker that starts or has died is not ready; one that drains finishes what it has."""

    since_s: float = 0.0
    until_s: float | None = None  # given back
    is_up: bool = True
    is_draining: bool = False
    num_deaths: int = 0

    @property
    def is_ready(self) -> bool:
        return self.is_up and not self.is_draining and self.until_s is None

    def seconds(self, end_s: float) -> float:
        """How long it was there, by the end of the simulation."""
        return max(1e-9, (end_s if self.until_s is None else min(end_s, self.until_s)) - self.since_s)
