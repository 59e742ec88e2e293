"""What a comparison is. Knows errors and verdicts; knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median


class Use(StrEnum):
    """What a published figure was used for."""

    FIT = "fit"  # constants were adjusted to it
    PREDICT = "predict"  # it only judges


@dataclass(frozen=True, slots=True)
class Comparison:
    """One published figure beside ours."""

    what: str
    use: Use
    inputs: str
    published: float
    ours: float
    unit: str
    source: str
    tolerance: float  # relative; a larger error is called a miss
    published_high: float | None = None  # where a range was published

    @property
    def error(self) -> float:
        """Relative to the nearest published value; 0.0 inside a range."""
        low, high = self.published, self.published if self.published_high is None else self.published_high
        nearest = min(max(self.ours, low), high)
        return self.ours / nearest - 1

    @property
    def is_met(self) -> bool:
        return abs(self.error) <= self.tolerance


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Relative errors of many rows of a measured file."""

    what: str
    use: Use
    inputs: str
    num_rows: int
    median_error: float  # signed: the bias
    median_absolute_error: float
    p90_absolute_error: float

    @classmethod
    def of(cls, what: str, use: Use, inputs: str, errors: Sequence[float]) -> "ErrorSummary":
        """Raises ValueError without errors."""
        absolute = sorted(abs(error) for error in errors)
        if not absolute:
            raise ValueError(f"{what}: no rows")
        p90 = absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))]
        return cls(what, use, inputs, len(absolute), median(errors), median(absolute), p90)
