"""How a worker, its slot and its Ray actor are named: pool, index and epoch; and what an actor needs. Knows no Ray."""

import re
from dataclasses import dataclass, replace
from typing import Self

from shoal.config.worker import Pool

_ACTOR_NAME = re.compile(r"^shoal-(prefill|decode)-(\d+)-e(\d+)$")


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a pool. It outlives the actors that fill it, one epoch after another."""

    pool: Pool
    index: int

    @property
    def worker_id(self) -> str:
        return f"{self.pool}-{self.index}"


@dataclass(frozen=True, slots=True)
class ActorName:
    """One incarnation of a slot."""

    slot: Slot
    epoch: int

    def __str__(self) -> str:
        return f"shoal-{self.slot.pool}-{self.slot.index}-e{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read an actor's name; None when it is not one of ours."""
        match = _ACTOR_NAME.match(text)
        if match is None:
            return None
        return cls(Slot(Pool(match[1]), int(match[2])), int(match[3]))

    def next(self) -> Self:
        return replace(self, epoch=self.epoch + 1)


@dataclass(frozen=True, slots=True)
class ActorResources:
    """What Ray reserves for one worker, and where it may run."""

    num_cpus: float
    num_gpus: float = 0
    use_pool_label: bool = False  # only nodes labelled pool=<pool>
