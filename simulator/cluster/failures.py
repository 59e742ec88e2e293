"""Workers that die and come back, empty. Knows when; the front door knows what becomes of their requests."""

import random
from dataclasses import dataclass
from functools import partial

from shoal.errors import NotFound
from shoal.simulator.cluster.decode_node import DecodeNode
from shoal.simulator.cluster.events import Event
from shoal.simulator.cluster.front_door import FrontDoor
from shoal.simulator.cluster.prefill_node import PrefillNode
from shoal.simulator.cluster.spec import FailureSpec


@dataclass(slots=True, eq=False)
class Failures:
    """Kills and restarts the workers of a front door."""

    spec: FailureSpec
    door: FrontDoor
    seed: int
    num_deaths: int = 0

    def first(self) -> list[Event]:
        """The planned deaths, and the first one of each worker by chance. Raises NotFound for a worker that is not there."""
        known = self.door.decode.keys() | self.door.prefill.keys()
        for failure in self.spec.planned:
            if failure.worker not in known:
                raise NotFound(f"no worker is called {failure.worker!r}; workers: {', '.join(sorted(known))}")
        events = [(failure.at_s, partial(self._fail, failure.worker)) for failure in self.spec.planned]
        return [*events, *(event for name in sorted(known) for event in self.by_chance(name, 0.0))]

    def by_chance(self, name: str, now: float) -> list[Event]:
        """The next death of a worker that is up since `now`."""
        if self.spec.mtbf_s is None:
            return []
        num_before = self._node(name).life.num_deaths
        uptime = random.Random(f"{self.seed}/failures/{name}/{num_before}").expovariate(1 / self.spec.mtbf_s)
        return [(now + uptime, partial(self._fail, name))]

    def _fail(self, name: str, now: float) -> list[Event]:
        node = self._node(name)
        if self.door.is_done or not node.life.is_up or node.life.until_s is not None:
            return []
        self.num_deaths += 1
        held = [(job, 0 if job.decode is None else job.decode.num_generated(job, now)) for job in self.door.jobs_of(name)]
        node.life.is_up = False
        node.life.num_deaths += 1
        node.fail(now)
        events = [event for job, num_generated in held for event in self.door.retry(job, num_generated, now)]
        return [*events, (now + self.spec.restart_s, partial(self._restart, name))]

    def _restart(self, name: str, now: float) -> list[Event]:
        self._node(name).life.is_up = True
        return self.by_chance(name, now)

    def _node(self, name: str) -> DecodeNode | PrefillNode:
        return self.door.decode[name] if name in self.door.decode else self.door.prefill[name]
