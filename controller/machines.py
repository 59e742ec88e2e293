"""Who brings the machines that new workers need, and takes back those that are empty. Knows when; knows no pool's need.

`FixedMachines`: nobody; workers must find room in the Ray there is. `RayMachines`: Ray's own autoscaler, which sees workers that
wait for a place as demand and takes idle nodes back. `KubeRayMachines` (kuberay.py): we, by the RayCluster's worker groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.config.worker import Pool


@dataclass(frozen=True, slots=True)
class Held:
    """Where a pool's workers are: machines by name, those that drain included, and workers that have no place yet."""

    machines: frozenset[str]
    num_unplaced: int


class Machines(Protocol):
    """Raises Unavailable, Unauthenticated, NotFound or InvalidConfig with words for whoever watches."""

    @property
    def may_come(self) -> bool:
        """Whether workers may be ordered that have no place yet."""

    async def most(self, pool: Pool) -> int | None:
        """How many workers of a pool there may ever be, where somebody else bounds that too."""

    async def settle(self, held: Mapping[Pool, Held]) -> None:
        """Have a machine for each worker, and give back those that hold none. Called at every look."""


class FixedMachines:
    """What Ray has is all there is."""

    may_come = False

    async def most(self, pool: Pool) -> int | None:
        return None

    async def settle(self, held: Mapping[Pool, Held]) -> None:
        """Nothing to do."""


class RayMachines(FixedMachines):
    """Ray's autoscaler brings nodes for actors that wait, and ends those that idle."""

    may_come = True
