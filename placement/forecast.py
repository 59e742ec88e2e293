"""How many will arrive per second some time from now: a level and a trend out of what has arrived. Pure; has no clock of its own.

Two exponential means of the rate, a fast and a slow one. On a ramp of slope k each lags by its time constant, so the two tell
k = (fast − slow) / (τ_slow − τ_fast) and the rate now, fast + k·τ_fast. The trend counts only where it is more than the noise of
Poisson arrivals, whose fast mean has the variance rate / (2·τ_fast), and only upwards: a fall is waited for.
"""

import math
from typing import Final

_FAST_S: Final = 30.0
_SLOW_S: Final = 240.0
_SIGNIFICANT: Final = 1.5  # standard deviations


class Forecast:
    """`saw` is told each interval's count; `per_s` looks ahead."""

    def __init__(self) -> None:
        self._fast = self._slow = 0.0
        self._seen_s = 0.0

    def saw(self, count: float, seconds: float) -> None:
        """So many have arrived in so many seconds."""
        if seconds <= 0:
            return
        self._seen_s += seconds
        self._fast += _weight(seconds, _FAST_S) * (count / seconds - self._fast)
        self._slow += _weight(seconds, _SLOW_S) * (count / seconds - self._slow)

    @property
    def now_per_s(self) -> float:
        """The level: corrected for the little that has been seen at first."""
        return self._fast / _weight(self._seen_s, _FAST_S) if self._seen_s else 0.0

    def per_s(self, ahead_s: float) -> float:
        """Expected so many seconds from now. At least the present level, at most twice that."""
        level = self.now_per_s
        if self._seen_s < _SLOW_S:
            return level
        slow = self._slow / _weight(self._seen_s, _SLOW_S)
        noise = math.sqrt(max(level, slow) / (2 * _FAST_S))
        if level - slow <= _SIGNIFICANT * noise:
            return level
        slope = (level - slow) / (_SLOW_S - _FAST_S)
        return min(2 * level, level + slope * (_FAST_S + ahead_s))


def _weight(seconds: float, constant_s: float) -> float:
    return 1 - math.exp(-seconds / constant_s)
