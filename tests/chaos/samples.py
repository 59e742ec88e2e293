"""What every process of a cluster holds, sampled over time, and whether it stays flat. Reads processes; knows no request."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from tests.chaos.cluster import Ident

SETTLED = 1 / 3  # of the time at the start, in which caches fill, does not count
GROWTH_SHARE = 0.02  # of the mean, over the rest of the time
GROWTH_BYTES = 4 << 20  # or so much, whichever is more
GROWTH_COUNT = 3.0  # file descriptors, threads


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment. `num_used_blocks` is None for processes without KV blocks."""

    at_s: float
    rss_bytes: int
    num_fds: int
    num_threads: int
    num_used_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Course:
    """How one figure went: its mean after settling, and what a straight line through it grows by in that time."""

    mean: float
    growth: float
    largest: float

    @classmethod
    def of(cls, times: Sequence[float], values: Sequence[float]) -> "Course":
        """Least squares over what follows the settling; needs two samples there."""
        start = times[0] + SETTLED * (times[-1] - times[0])
        points = [(at, value) for at, value in zip(times, values, strict=True) if at >= start]
        mean_at = sum(at for at, _ in points) / len(points)
        mean = sum(value for _, value in points) / len(points)
        spread = sum((at - mean_at) ** 2 for at, _ in points)
        slope = sum((at - mean_at) * (value - mean) for at, value in points) / spread if spread else 0.0
        return cls(mean, slope * (points[-1][0] - points[0][0]), max(values))


@dataclass(frozen=True, slots=True)
class Holdings:
    """One process over the whole time."""

    name: str
    rss: Course
    fds: Course
    threads: Course
    blocks_at_end: int | None

    @property
    def faults(self) -> list[str]:
        """What grows beyond the bounds."""
        found = []
        if self.rss.growth > max(GROWTH_SHARE * self.rss.mean, GROWTH_BYTES):
            found.append(f"memory grows by {self.rss.growth / 1e6:.1f} MB")
        for what, course in (("file descriptors", self.fds), ("threads", self.threads)):
            if course.growth > GROWTH_COUNT:
                found.append(f"{what} grow by {course.growth:.1f}")
        if self.blocks_at_end:
            found.append(f"{self.blocks_at_end} blocks in use at the end")
        return found


def take(idents: Mapping[str, Ident], blocks: Mapping[str, int], at_s: float) -> dict[str, Sample]:
    """One sample of each process that lives."""
    samples: dict[str, Sample] = {}
    for name, ident in idents.items():
        process = ident.find()
        if process is None:
            continue
        with contextlib.suppress(psutil.Error):
            fds, threads = process.num_fds(), process.num_threads()
            samples[name] = Sample(at_s, process.memory_info().rss, fds, threads, blocks.get(name))
    return samples


def holdings(name: str, samples: Sequence[Sample]) -> Holdings:
    """What one process' samples say."""
    times = [sample.at_s for sample in samples]
    return Holdings(
        name,
        Course.of(times, [float(sample.rss_bytes) for sample in samples]),
        Course.of(times, [float(sample.num_fds) for sample in samples]),
        Course.of(times, [float(sample.num_threads) for sample in samples]),
        samples[-1].num_used_blocks,
    )
