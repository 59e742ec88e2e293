"""How many workers a pool should have: predicted need, under bounds and cool-downs. Pure; knows no workers, no calls, no clock.

The need is the larger of two: workers for the work that arrives (and what waits, worked off within `drain_s`) at the target
utilisation, and workers for what cannot be exceeded (KV blocks, places in a batch) at the target occupancy. Going up happens at
once, as far as needed; going down one worker at a time, and only after the need has stayed lower for `down_cooldown_s`.
Controller and simulator call this same rule.
"""

import math
from dataclasses import dataclass, replace

from shoal.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class AutoscalePolicy:
    """Of one pool. Raises InvalidConfig when the numbers contradict each other."""

    min_workers: int = 1
    max_workers: int = 1
    target_utilisation: float = 0.7  # of a worker's rate of work
    target_occupancy: float = 0.8  # of its fullest resource
    drain_s: float = 5.0  # what waits should be worked off within this
    up_cooldown_s: float = 10.0  # between two steps up: new workers need time to show
    down_cooldown_s: float = 60.0  # how long the need must stay lower

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise InvalidConfig(f"a pool scales between 1 ≤ min ≤ max workers, not {self.min_workers} and {self.max_workers}")
        if not 0 < self.target_utilisation <= 1 or not 0 < self.target_occupancy <= 1:
            raise InvalidConfig("autoscaling targets lie in (0, 1]")
        if not self.drain_s > 0 or self.up_cooldown_s < 0 or self.down_cooldown_s < 0:
            raise InvalidConfig("autoscaling needs drain_s above 0 and cool-downs of 0 or more")


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What a pool was asked for since it was last looked at. Work in any unit, the same for all three."""

    offered_per_s: float  # work that arrives
    waiting: float  # work that waits to begin
    capacity_per_s: float  # work that one worker does
    occupancy: float = 0.0  # mean share of the fullest resource of the workers there are, 0…1


@dataclass(frozen=True, slots=True)
class ScaleState:
    """What the rule remembers between two calls. Times in the caller's seconds."""

    last_up_s: float = -math.inf
    lower_since_s: float | None = None  # since when fewer workers would have done


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """How many workers to have from now on."""

    num_workers: int
    num_needed: int  # before bounds and cool-downs
    state: ScaleState


def num_needed(policy: AutoscalePolicy, demand: PoolDemand, num_workers: int) -> int:
    """Workers that meet both targets, at least 1."""
    work = demand.offered_per_s + demand.waiting / policy.drain_s
    by_work = math.ceil(work / (demand.capacity_per_s * policy.target_utilisation) - 1e-9) if demand.capacity_per_s > 0 else 1
    by_room = math.ceil(num_workers * demand.occupancy / policy.target_occupancy - 1e-9)
    return max(1, by_work, by_room)


def scale(policy: AutoscalePolicy, demand: PoolDemand, num_workers: int, now_s: float, state: ScaleState) -> ScaleDecision:
    """The pool's size from now on. `num_workers` counts those that start as well; those that drain do not count."""
    needed = num_needed(policy, demand, num_workers)
    wanted = min(policy.max_workers, max(policy.min_workers, needed))
    if wanted > num_workers:
        state = replace(state, lower_since_s=None)
        if num_workers >= policy.min_workers and now_s - state.last_up_s < policy.up_cooldown_s:
            return ScaleDecision(num_workers, needed, state)
        return ScaleDecision(wanted, needed, replace(state, last_up_s=now_s))
    if wanted == num_workers:
        return ScaleDecision(num_workers, needed, replace(state, lower_since_s=None))
    since = now_s if state.lower_since_s is None else state.lower_since_s
    if num_workers <= policy.max_workers and now_s - since < policy.down_cooldown_s:
        return ScaleDecision(num_workers, needed, replace(state, lower_since_s=since))
    return ScaleDecision(num_workers - 1, needed, replace(state, lower_since_s=now_s))
