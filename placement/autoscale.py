"""How many workers a pool should have: predicted need, under bounds and cool-downs. Pure; knows no workers, no calls, no clock.

The need is the largest of three: workers for the work that arrives (and what waits, worked off within `drain_s`) at the target
utilisation, workers that keep the wait short, and workers for what cannot be exceeded (KV blocks, places in a batch) at the
target occupancy. Going up happens at once, as far as needed; going down one worker at a time, only after the need has stayed
lower for `down_cooldown_s`, and only where one worker less would do with `hysteresis` to spare.
Controller and simulator call this same rule. Where demand comes from: placement/need.py.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from shoal.errors import InvalidConfig


class Because(StrEnum):
    """Words of a decision; docs/autoscaling.md explains each. Several may apply."""

    WORK = "work"  # what asks for the most workers: arriving and waiting work,
    WAIT = "wait"  # the wait that TTFT leaves,
    ROOM = "room"  # KV blocks or places in a batch,
    MIN = "min"  # the bounds,
    MAX = "max"
    UP_COOLDOWN = "up_cooldown"  # or what it waits for
    DOWN_COOLDOWN = "down_cooldown"
    HYSTERESIS = "hysteresis"


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
    hysteresis: float = 0.0  # share of the targets that must be free before a worker goes

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise InvalidConfig(f"a pool scales between 1 ≤ min ≤ max workers, not {self.min_workers} and {self.max_workers}")
        if not 0 < self.target_utilisation <= 1 or not 0 < self.target_occupancy <= 1:
            raise InvalidConfig("autoscaling targets lie in (0, 1]")
        if not self.drain_s > 0 or not self.up_cooldown_s >= 0 or not self.down_cooldown_s >= 0:
            raise InvalidConfig("autoscaling needs drain_s above 0 and cool-downs of 0 or more")
        if not 0 <= self.hysteresis < 1:
            raise InvalidConfig(f"hysteresis lies in [0, 1), not {self.hysteresis:g}")


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What a pool was asked for since it was last looked at. Work in any unit, the same for all three."""

    offered_per_s: float  # work that arrives
    waiting: float  # work that waits to begin
    capacity_per_s: float  # work that one worker does
    room: float = 0.0  # so many workers are full, or would be, of their fullest resource
    num_for_wait: int = 1


@dataclass(frozen=True, slots=True)
class Need:
    """Workers by what asks for them, each at least 1."""

    for_work: int = 1
    for_wait: int = 1
    for_room: int = 1

    @property
    def num_workers(self) -> int:
        return max(self.for_work, self.for_wait, self.for_room)

    @property
    def because(self) -> Because | None:
        """What asks for the most; None where one worker is enough for everything."""
        most = self.num_workers
        asked = ((self.for_work, Because.WORK), (self.for_wait, Because.WAIT), (self.for_room, Because.ROOM))
        return next((word for number, word in asked if number == most), None) if most > 1 else None


@dataclass(frozen=True, slots=True)
class ScaleState:
    """What the rule remembers between two calls. Times in the caller's seconds."""

    last_up_s: float = -math.inf
    lower_since_s: float | None = None  # since when fewer workers would have done


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """How many workers to have from now on."""

    num_workers: int
    need: Need  # before bounds and cool-downs
    state: ScaleState
    because: tuple[Because, ...] = ()

    @property
    def num_needed(self) -> int:
        return self.need.num_workers


def need(policy: AutoscalePolicy, demand: PoolDemand) -> Need:
    """Workers that meet every target."""
    work = demand.offered_per_s + demand.waiting / policy.drain_s
    by_work = math.ceil(work / (demand.capacity_per_s * policy.target_utilisation) - 1e-9) if demand.capacity_per_s > 0 else 1
    by_room = math.ceil(demand.room / policy.target_occupancy - 1e-9)
    return Need(max(1, by_work), max(1, demand.num_for_wait), max(1, by_room))


def scale(policy: AutoscalePolicy, demand: PoolDemand, num_workers: int, now_s: float, state: ScaleState) -> ScaleDecision:
    """The pool's size from now on. `num_workers` counts those that start as well; those that drain do not count."""
    needed = need(policy, demand)
    wanted = min(policy.max_workers, max(policy.min_workers, needed.num_workers))
    asked = () if needed.because is None else (needed.because,)
    bound = (Because.MAX,) if needed.num_workers > wanted else (Because.MIN,) if needed.num_workers < wanted else ()
    if wanted > num_workers:
        state = replace(state, lower_since_s=None)
        if num_workers >= policy.min_workers and now_s - state.last_up_s < policy.up_cooldown_s:
            return ScaleDecision(num_workers, needed, state, (*asked, Because.UP_COOLDOWN))
        return ScaleDecision(wanted, needed, replace(state, last_up_s=now_s), (*asked, *bound))
    if wanted == num_workers:
        return ScaleDecision(num_workers, needed, replace(state, lower_since_s=None), (*asked, *bound))
    is_over = num_workers > policy.max_workers
    if not is_over and not _would_do(policy, demand, num_workers):
        return ScaleDecision(num_workers, needed, replace(state, lower_since_s=None), (*asked, Because.HYSTERESIS))
    since = now_s if state.lower_since_s is None else state.lower_since_s
    if not is_over and now_s - since < policy.down_cooldown_s:
        return ScaleDecision(num_workers, needed, replace(state, lower_since_s=since), (*asked, Because.DOWN_COOLDOWN))
    return ScaleDecision(num_workers - 1, needed, replace(state, lower_since_s=now_s), (*asked, *bound))


def _would_do(policy: AutoscalePolicy, demand: PoolDemand, num_workers: int) -> bool:
    """Whether one worker less meets the targets with the hysteresis to spare."""
    share = 1 - policy.hysteresis
    strict = replace(
        policy, target_utilisation=policy.target_utilisation * share, target_occupancy=policy.target_occupancy * share
    )
    return need(strict, demand).num_workers < num_workers
