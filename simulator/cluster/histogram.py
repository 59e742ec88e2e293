"""Counts of seconds in logarithmic bins of 1 %: percentiles of very many values in flat memory. Knows no meaning."""

import math
from collections import Counter


class LogHistogram:
    """Values are kept to 1 %; zero and less go to the lowest bin."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.num_values = 0
        self._total = 0.0
        self._step = math.log(1.01)

    def add(self, seconds: float, count: int) -> None:
        """Count a value `count` times."""
        self._counts[math.floor(math.log(max(seconds, 1e-9)) / self._step)] += count
        self.num_values += count
        self._total += seconds * count

    @property
    def mean(self) -> float | None:
        """Exact; None without values."""
        return self._total / self.num_values if self.num_values else None

    def percentile(self, share: float) -> float | None:
        """The value below which `share` of all lie; None without values."""
        if not self.num_values:
            return None
        left = share * self.num_values
        for bin_index in sorted(self._counts):
            left -= self._counts[bin_index]
            if left <= 0:
                return math.exp((bin_index + 0.5) * self._step)
        return math.exp((max(self._counts) + 0.5) * self._step)
