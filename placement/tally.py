"""What a worker has done since it started: counts that only grow, from which autoscaling takes differences. Pure; has no clock.

Sizes are counted by their number of binary digits: bucket 0 holds 0, bucket i holds 2^(i-1) … 2^i − 1. With the exact sum
beside them that keeps a distribution within a factor of two in a few dozen numbers, and differences of two reports add up.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final


@dataclass(slots=True)
class SizeCounts:
    """How many there were of each size, and their sum."""

    by_size: list[int] = field(default_factory=list)
    total: int = 0

    def add(self, size: int) -> None:
        bucket = size.bit_length()
        self.by_size += [0] * (bucket + 1 - len(self.by_size))
        self.by_size[bucket] += 1
        self.total += size

    def since(self, before: "SizeCounts") -> "SizeCounts":
        """What has come since an earlier state of these."""
        padded = (*before.by_size, *[0] * (len(self.by_size) - len(before.by_size)))
        return SizeCounts([now - then for now, then in zip(self.by_size, padded, strict=True)], self.total - before.total)

    def plus(self, more: "SizeCounts") -> "SizeCounts":
        """Both together."""
        length = max(len(self.by_size), len(more.by_size))
        counts = ((*each.by_size, *[0] * (length - len(each.by_size))) for each in (self, more))
        return SizeCounts([a + b for a, b in zip(*counts, strict=True)], self.total + more.total)


@dataclass(slots=True)
class Tally:
    """Kept by a worker's rooms as things happen."""

    num_arrived: int = 0  # requests, taken in or still waiting
    prompts: SizeCounts = field(default_factory=SizeCounts)  # prefill tokens that a request had to run here
    answers: SizeCounts = field(default_factory=SizeCounts)  # tokens that were sampled here for a request that ended
    num_steps: int = 0
    step_s: float = 0.0
    step_reqs: int = 0
    step_tokens: int = 0

    def stepped(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """A step has run."""
        self.num_steps += 1
        self.step_s += seconds
        self.step_reqs += num_requests
        self.step_tokens += num_tokens

    def since(self, before: "Tally") -> "Tally":
        """What has been done since an earlier state of this one."""
        return Tally(
            self.num_arrived - before.num_arrived,
            self.prompts.since(before.prompts),
            self.answers.since(before.answers),
            self.num_steps - before.num_steps,
            self.step_s - before.step_s,
            self.step_reqs - before.step_reqs,
            self.step_tokens - before.step_tokens,
        )

    def plus(self, more: "Tally") -> "Tally":
        """Both together, as of two workers."""
        return Tally(
            self.num_arrived + more.num_arrived,
            self.prompts.plus(more.prompts),
            self.answers.plus(more.answers),
            self.num_steps + more.num_steps,
            self.step_s + more.step_s,
            self.step_reqs + more.step_reqs,
            self.step_tokens + more.step_tokens,
        )

    def copy(self) -> "Tally":
        """The state now."""
        return self.plus(Tally())


@dataclass(frozen=True, slots=True)
class Sizes:
    """A distribution of sizes as a report carries it; counts may have faded."""

    by_size: tuple[float, ...] = ()
    total: float = 0.0

    @property
    def num(self) -> float:
        return sum(self.by_size)

    @property
    def mean(self) -> float:
        """0 of none."""
        return self.total / self.num if self.num > 0 else 0.0

    def parts(self) -> Iterator[tuple[float, float]]:
        """(share, size) of each bucket, the buckets' middles moved together so that the mean is exact."""
        num = self.num
        guess = sum(count * _middle(bucket) for bucket, count in enumerate(self.by_size))
        factor = self.total / guess if guess > 0 else 1.0
        for bucket, count in enumerate(self.by_size):
            if count > 0:
                yield count / num, _middle(bucket) * factor

    def quantile(self, share: float) -> float:
        """The size that so large a share does not exceed; 0 of none."""
        reached = largest = 0.0
        for part, size in self.parts():
            reached, largest = reached + part, size
            if reached >= share - 1e-9:
                break
        return largest

    def plus(self, by_size: Sequence[float], total: float, kept: float = 1.0) -> "Sizes":
        """These, faded to the share `kept`, and some more."""
        length = max(len(self.by_size), len(by_size))
        old = (*self.by_size, *[0.0] * (length - len(self.by_size)))
        new = (*by_size, *[0] * (length - len(by_size)))
        return Sizes(tuple(kept * a + b for a, b in zip(old, new, strict=True)), kept * self.total + total)


NO_SIZES: Final = Sizes()


def _middle(bucket: int) -> float:
    return 0.0 if bucket == 0 else 1.0 if bucket == 1 else math.sqrt(2.0) * 2.0 ** (bucket - 1)
