"""The event loop: a heap of (time, order, handler); a handler returns the events it causes. Knows time, nothing else."""

import heapq
from collections.abc import Callable, Iterable
from typing import Protocol

Handler = Callable[[float], "Iterable[Event]"]
Event = tuple[float, Handler]  # when (seconds), and what is called with that time


class Watcher(Protocol):
    """Told now and then how far the simulation is; True ends it."""

    def __call__(self, now: float) -> bool: ...


class EventLoop:
    """Runs handlers in order of time; events of one time in the order they were made, so that reruns are identical."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Handler]] = []
        self._num_made = 0
        self.num_run = 0
        self.now = 0.0

    def add(self, events: "Iterable[Event]") -> None:
        """Schedule events. None may lie in the past."""
        for at, handler in events:
            if at < self.now:
                raise ValueError(f"an event at {at} s was made at {self.now} s")
            heapq.heappush(self._heap, (at, self._num_made, handler))
            self._num_made += 1

    def run(self, watcher: Watcher | None = None, *, every: int = 500) -> float:
        """Until no event is left, or the watcher has seen enough. Returns the time of the last one."""
        while self._heap:
            self.now, _, handler = heapq.heappop(self._heap)
            self.add(handler(self.now))
            self.num_run += 1
            if watcher is not None and self.num_run % every == 0 and watcher(self.now):
                break
        return self.now
