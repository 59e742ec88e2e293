"""Finds, for every family, the fewest workers that meet the targets, and the best of all. Knows bounds and outcomes only.

Per family (worker_counts.py) the search starts at the bound and adds workers to the pool that misses its target until both are
met, then looks at every cheaper pair of numbers that no failure of a larger pair rules out. Every judgement is a simulation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import InvalidConfig
from shoal.simulator.cluster.outcome import Outcome, RequestLog
from shoal.simulator.cluster.simulate import simulate
from shoal.simulator.planning.bounds import Bounds, bounds
from shoal.simulator.planning.candidates import Family, Options, families, not_yet_runnable
from shoal.simulator.planning.demand import Demand
from shoal.simulator.planning.worker_counts import Numbers, fewest

_PRUNE_FACTOR = 2.0  # of the cheapest plan so far; dearer families are not simulated

Watch = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """One simulated cluster. TTFT and TPOT are at the wanted quantile."""

    family: Family
    num_prefill: int
    num_decode: int
    outcome: Outcome
    ttft_s: float
    tpot_s: float
    meets: bool
    not_runnable: str

    @property
    def cost(self) -> float:
        """USD per hour, or GPUs where a price is missing."""
        return self.family.cost(self.num_prefill, self.num_decode)[0]

    @property
    def price(self) -> str:
        """The cost in words."""
        return self.family.in_words(self.cost)

    @property
    def num_gpus(self) -> int:
        return self.outcome.num_gpus


@dataclass(frozen=True, slots=True)
class Rejection:
    """A family without a plan, and why."""

    family: Family
    bounds: Bounds
    reason: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Every plan simulated that meets the targets or came closest in its family, and what was ruled out."""

    plans: tuple[Plan, ...]
    rejections: tuple[Rejection, ...]
    num_simulated: int

    @property
    def best(self) -> Plan | None:
        """The cheapest that meets the targets; of equals the fastest to the first token."""
        able = [plan for plan in self.plans if plan.meets]
        return min(able, key=lambda plan: (plan.cost, plan.ttft_s, plan.tpot_s), default=None)

    @property
    def best_runnable(self) -> Plan | None:
        """The cheapest that meets the targets and that Shoal itself can run."""
        able = [plan for plan in self.plans if plan.meets and not plan.not_runnable]
        return min(able, key=lambda plan: (plan.cost, plan.ttft_s, plan.tpot_s), default=None)

    @property
    def best_split(self) -> Plan | None:
        """The cheapest with two pools, of those that Shoal can run if there are any: what links and depths are studied on."""
        able = [plan for plan in self.plans if plan.meets and not plan.family.is_colocated]
        return min(able, key=lambda plan: (bool(plan.not_runnable), plan.cost, plan.ttft_s, plan.tpot_s), default=None)

    @property
    def baseline(self) -> Plan | None:
        """The cheapest colocated plan that meets the targets."""
        able = [plan for plan in self.plans if plan.meets and plan.family.is_colocated]
        return min(able, key=lambda plan: (plan.cost, plan.ttft_s), default=None)

    @property
    def front(self) -> tuple[Plan, ...]:
        """Plans that meet the targets and that no other beats in cost, TTFT and TPOT at once; cheapest first."""
        able = [plan for plan in self.plans if plan.meets]
        kept = [plan for plan in able if not any(_dominates(other, plan) for other in able)]
        return tuple(sorted(kept, key=lambda plan: (plan.cost, plan.ttft_s)))


def search(options: Options, demand: Demand, *, seed: int = 0, watch: Watch | None = None) -> SearchResult:
    """Search all families. Raises InvalidConfig when no family can meet the targets, naming the bound that is nearest."""
    plans: list[Plan] = []
    rejections: list[Rejection] = []
    num_simulated = 0
    cheapest: float | None = None
    for family in families(options):
        if watch is not None:
            watch(_name(family))
        limit = bounds(family, demand, options.quantile)
        reason = limit.impossible
        cost, gpus = family.cost(limit.num_prefill, limit.num_decode)
        if not reason and gpus > options.max_gpus:
            reason = f"needs at least {gpus} GPUs, more than the {options.max_gpus} allowed"
        if not reason and cheapest is not None and cost > _PRUNE_FACTOR * cheapest:
            reason = f"costs at least {family.in_words(cost)}, more than {_PRUNE_FACTOR:g} times the cheapest plan so far"
        if reason:
            rejections.append(Rejection(family, limit, reason))
            continue
        ceiling = None if cheapest is None else _PRUNE_FACTOR * cheapest
        found = list(_plans(family, limit, options, demand, seed, ceiling))
        num_simulated += len(found)
        good = [plan for plan in found if plan.meets]
        plans += good or found[-1:]
        if good:
            cheapest = min([plan.cost for plan in good] + ([cheapest] if cheapest is not None else []))
    if not any(plan.meets for plan in plans):
        raise InvalidConfig(_why_nothing(plans, rejections, options))
    return SearchResult(tuple(plans), tuple(rejections), num_simulated)


def evaluate(
    family: Family, num_prefill: int, num_decode: int, demand: Demand, quantile: float, seed: int, *, whole: bool = False
) -> Plan:
    """Simulate one cluster and judge it at a quantile.

    Unless `whole`, stop once more requests have missed a target than the quantile allows.
    """
    allowed = (1 - quantile) * len(demand.requests)

    def hopeless(log: RequestLog) -> bool:
        return max(log.num_late, log.num_slow, log.refused.total()) > allowed + 1

    outcome = simulate(
        family.spec(max(1, num_prefill), num_decode), iter(demand.requests), seed=seed, give_up=None if whole else hopeless
    )
    ttft, tpot = outcome.ttft_s.at(quantile), outcome.tpot_s.at(quantile)
    ttft_s = float("inf") if ttft is None else ttft
    tpot_s = 0.0 if tpot is None else tpot
    refused = outcome.num_refused / max(1, outcome.num_refused + outcome.num_finished)
    meets = not outcome.gave_up and ttft_s <= family.slo.ttft_s and tpot_s <= family.slo.tpot_s and refused <= 1 - quantile
    return Plan(family, num_prefill, num_decode, outcome, ttft_s, tpot_s, meets, not_yet_runnable(family))


def _plans(family: Family, limit: Bounds, options: Options, demand: Demand, seed: int, ceiling: float | None) -> list[Plan]:
    """Every cluster of a family that was simulated, the last one among the nearest to the targets."""
    tried: dict[Numbers, Plan] = {}

    def judged(numbers: Numbers) -> Plan:
        if numbers not in tried:
            tried[numbers] = evaluate(family, *numbers, demand, options.quantile, seed)
        return tried[numbers]

    def allowed(numbers: Numbers) -> bool:
        cost, gpus = family.cost(*numbers)
        return gpus <= options.max_gpus and (ceiling is None or cost <= ceiling)

    fewest(
        (limit.num_prefill, limit.num_decode),
        judge=lambda numbers: judged(numbers).meets,
        short_of=lambda numbers: _short_of(judged(numbers), family),
        cost=lambda numbers: family.cost(*numbers)[0],
        allowed=allowed,
    )
    return list(tried.values())


def _short_of(plan: Plan, family: Family) -> Numbers:
    """How many prefill and decode workers to add, by what was missed; at least one. Larger misses add more at once."""
    slo = family.slo
    if family.is_colocated:
        return 0, 1
    grow = 1 + max(0, int(min(4.0, plan.ttft_s / slo.ttft_s)) - 1)
    exposed, compute = plan.outcome.exposed_s.p95 or 0.0, plan.outcome.queueing_s.p95 or 0.0
    if plan.ttft_s > slo.ttft_s and exposed > slo.ttft_s / 4 and exposed > compute:
        return (0, 1) if plan.num_decode <= plan.num_prefill else (1, 0)  # the link holds it up: the smaller pool has fewer ports
    waits = plan.outcome.queueing_s.p95 or 0.0
    decode_is_full = next(r.peak or 0.0 for r in plan.outcome.resources if r.name == "decode KV memory") > 0.98
    more_decode = int(plan.tpot_s > slo.tpot_s or plan.outcome.num_refused > 0 or (decode_is_full and waits > slo.ttft_s / 4))
    more_prefill = grow if plan.ttft_s > slo.ttft_s and not (decode_is_full and more_decode) else 0
    return (more_prefill, more_decode) if more_prefill or more_decode else (1, 0)


def _dominates(one: Plan, other: Plan) -> bool:
    first, second = (one.cost, one.ttft_s, one.tpot_s), (other.cost, other.ttft_s, other.tpot_s)
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))


def _name(family: Family) -> str:
    kind = f"{family.visibility.policy}{', colocated' if family.is_colocated else ''}"
    return f"{kind} on {family.decode.tensor_parallel} × {family.decode.gpu.name}"


def _why_nothing(plans: list[Plan], rejections: list[Rejection], options: Options) -> str:
    """Which bound forbids the targets, in the family that comes nearest to them."""
    slo = options.slo
    bounded = [rejection for rejection in rejections if rejection.bounds.impossible]
    if bounded and not plans:
        nearest = min(
            bounded, key=lambda r: max(0.0, r.bounds.ttft_s / slo.ttft_s - 1) + max(0.0, r.bounds.tpot_s / slo.tpot_s - 1)
        )
        return f"no plan can meet the targets; nearest is {_name(nearest.family)}: {nearest.bounds.impossible}"
    if plans:
        nearest_plan = min(plans, key=lambda plan: max(plan.ttft_s / slo.ttft_s, plan.tpot_s / slo.tpot_s))
        return (
            f"no plan of at most {options.max_gpus} GPUs meets the targets; nearest is {_name(nearest_plan.family)} with "
            f"{nearest_plan.num_gpus} GPUs: TTFT {1e3 * nearest_plan.ttft_s:,.1f} ms, TPOT {1e3 * nearest_plan.tpot_s:,.2f} ms; "
            f"raise --max-gpus or relax the targets"
        )
    return f"no plan can meet the targets: {rejections[0].reason}" if rejections else "nothing was given to choose from"
