"""A pool's recent past as autoscaling reads it: how many came, how long prompts and answers were. Pure; has no clock."""

from dataclasses import dataclass, field
from typing import Final

from shoal.placement.forecast import Forecast
from shoal.placement.tally import NO_SIZES, Sizes, Tally

_HALF_LIFE_S: Final = 300.0  # of the distributions of sizes


@dataclass(slots=True)
class PoolHistory:
    """Sizes fade by half in five minutes; the forecast has time constants of its own."""

    forecast: Forecast = field(default_factory=Forecast)
    prompts: Sizes = NO_SIZES
    answers: Sizes = NO_SIZES

    def saw(self, done: Tally, seconds: float, *, tells_rate: bool = True) -> None:
        """What has been done in so many seconds; without `tells_rate`, in an unknown time."""
        kept = 0.5 ** (seconds / _HALF_LIFE_S)
        self.prompts = self.prompts.plus(done.prompts.by_size, done.prompts.total, kept)
        self.answers = self.answers.plus(done.answers.by_size, done.answers.total, kept)
        if tells_rate:
            self.forecast.saw(done.num_arrived, seconds)
