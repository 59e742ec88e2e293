"""Draws requests from distributions, reproducibly. Knows arrivals and lengths; knows no trace.

Arrivals: Poisson, or a renewal process with gamma gaps of a given CV (CV 1 is Poisson), thinned to a daily curve
1 + amplitude · sin(2π t / period). Lengths: fixed, or log-normal of a given mean and CV, drawn independently of each other.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from shoal.errors import InvalidConfig
from shoal.simulator.workload.requests import SimRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """A length distribution: its mean in tokens, and a CV (0 = always the mean)."""

    mean: float
    cv: float = 0.0
    longest: int = 1_000_000

    def __post_init__(self) -> None:
        if not self.mean >= 1 or not self.cv >= 0:
            raise InvalidConfig(f"lengths need a mean of at least one token and a CV of 0 or more, not {self.mean} and {self.cv}")

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1."""
        if self.cv == 0:
            return min(self.longest, round(self.mean))
        sigma2 = math.log(1 + self.cv**2)
        value = rng.lognormvariate(math.log(self.mean) - sigma2 / 2, math.sqrt(sigma2))
        return max(1, min(self.longest, round(value)))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process: mean rate per second, CV of the gaps, daily curve."""

    rate: float
    cv: float = 1.0
    amplitude: float = 0.0
    period_s: float = 86_400.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise InvalidConfig(f"a rate of {self.rate} requests per second makes no sense; it must be more than zero")
        if not self.cv > 0 or not 0 <= self.amplitude <= 1 or not self.period_s > 0:
            raise InvalidConfig("arrivals need a CV above 0, an amplitude in 0…1 and a period above 0")

    def times(self, rng: random.Random) -> Iterator[float]:
        """Arrival times without end."""
        peak = self.rate * (1 + self.amplitude)
        shape = 1 / self.cv**2
        now = 0.0
        while True:
            now += rng.gammavariate(shape, 1 / (shape * peak))
            if rng.random() * (1 + self.amplitude) < 1 + self.amplitude * math.sin(2 * math.pi * now / self.period_s):
                yield now


def drawn(arrivals: Arrivals, prompt: Lengths, output: Lengths, num_requests: int, seed: int) -> Iterator[SimRequest]:
    """`num_requests` requests; the same seed gives the same ones. Each quantity has a generator of its own."""
    if num_requests < 1:
        raise InvalidConfig(f"{num_requests} requests make no simulation; ask for at least one")
    times, prompts, outputs = (random.Random(f"{seed}/{part}") for part in ("arrivals", "prompts", "outputs"))
    for now in islice(arrivals.times(times), num_requests):
        yield SimRequest(now, prompt.draw(prompts), output.draw(outputs))
