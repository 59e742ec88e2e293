"""How fast a worker has been lately: what a wait is predicted from. Knows work and durations; has no clock of its own."""

from collections.abc import Collection
from typing import Final

_HALF_LIFE_S: Final = 5.0  # of steps
_WEIGHT: Final = 0.1  # of the latest: the mean follows about twenty requests


class WorkRate:
    """Work per second of the steps that were run; idle time does not count, and old steps fade."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0

    def ran(self, work: float, seconds: float) -> None:
        """A step has done so much."""
        kept = 0.5 ** (seconds / _HALF_LIFE_S)
        self._work, self._seconds = self._work * kept + work, self._seconds * kept + seconds

    @property
    def per_s(self) -> float:
        """0 before any step."""
        return self._work / self._seconds if self._seconds > 0 else 0.0


class HoldTimes:
    """How long requests hold their blocks: a running mean over those that ended."""

    def __init__(self) -> None:
        self._mean_s: float | None = None

    def ended(self, held_s: float) -> None:
        """A request has given its blocks back."""
        self._mean_s = held_s if self._mean_s is None else self._mean_s + _WEIGHT * (held_s - self._mean_s)

    def mean_s(self, now: float, since: Collection[float]) -> float:
        """The mean, or the mean age of those that hold now (since `since`) where it is longer. 0 when nobody ever held.

        The second tells, before any has ended, that none does soon.
        """
        age_s = sum(now - begin for begin in since) / len(since) if since else 0.0
        return max(self._mean_s or 0.0, age_s)
