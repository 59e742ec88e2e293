"""What changes when the link or the prompts change, and which link each depth K would need. Knows one plan at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.simulator.planning.candidates import Family
from shoal.simulator.planning.demand import Demand
from shoal.simulator.planning.search import Plan, evaluate
from shoal.simulator.step_cost import StepCost
from shoal.simulator.transfer_cost import Wire, handoff_bytes, handoff_cost
from shoal.visibility import Visibility

LINK_FACTORS = (0.1, 0.25, 0.5, 2.0)
PROMPT_FACTORS = (0.5, 2.0)
_BUSY = 0.7  # share of a link that may be busy
_EXPOSED = 0.1  # share of the TTFT target that exposed transfer may take


@dataclass(frozen=True, slots=True)
class Change:
    """A plan simulated again with one thing changed."""

    what: str
    ttft_ms: float
    tpot_ms: float
    goodput_per_s: float
    slo_attainment: float
    meets: bool
    fullest: str


@dataclass(frozen=True, slots=True)
class LinkNeed:
    """The slowest link, per prefill worker, that one visibility would be content with."""

    visibility: str
    prompt_tokens: int
    wire_bytes: int
    for_load_gbit_s: float  # the link is at most 70 % busy at the plan's rate
    for_latency_gbit_s: float | None  # exposed transfer of the quantile's prompt is at most 10 % of the TTFT target; None: never
    gbit_s: float | None


def changes(plan: Plan, demand: Demand, quantile: float, seed: int) -> Iterator[Change]:
    """The plan as it is, over other links (split plans only), and with other prompts."""
    family, numbers = plan.family, (plan.num_prefill, plan.num_decode)
    yield _change("as planned", plan)
    if family.link is not None:
        for factor in LINK_FACTORS:
            link = replace(family.link, bytes_per_s=family.link.bytes_per_s * factor)
            other = replace(family, link=link)
            yield _change(
                f"link × {factor:g} ({8 * link.bytes_per_s / 1e9:g} Gb/s)",
                evaluate(other, *numbers, demand, quantile, seed, whole=True),
            )
    longest = family.model.shape.max_context - max(request.num_output_tokens for request in demand.requests)
    for factor in PROMPT_FACTORS:
        stretched = demand.with_prompts(factor, max(1, longest))
        yield _change(f"prompts × {factor:g}", evaluate(family, *numbers, stretched, quantile, seed, whole=True))


def link_needs(
    family: Family, visibilities: Sequence[Visibility], num_ports: int, demand: Demand, quantile: float
) -> list[LinkNeed]:
    """For each visibility, what link `num_ports` workers (of the smaller pool) would need. Nothing for colocated families."""
    if family.prefill is None or family.link is None:
        return []
    needs = []
    num_tokens = demand.prompt_quantile(quantile)
    for visibility in visibilities:
        cost = StepCost(family.model, family.prefill, visibility)
        replication = family.prefill.replication(family.model)
        wire = Wire.of(family.link, family.prefill, family.num_nics)
        mean = sum(
            handoff_bytes(family.model, visibility, request.num_prompt_tokens, replication=replication).total
            for request in demand.sample
        ) / len(demand.sample)
        load = demand.rate * mean / num_ports / _BUSY / wire.efficiency / wire.num_nics
        latency = _slowest(cost, wire, num_tokens, _EXPOSED * family.slo.ttft_s, family.token_budget)
        size = handoff_bytes(family.model, visibility, num_tokens, replication=replication).total
        both = None if latency is None else max(load, latency)
        needs.append(LinkNeed(str(visibility.policy), num_tokens, round(size), _gbit(load), _optional(latency), _optional(both)))
    return needs


def _slowest(cost: StepCost, wire: Wire, num_tokens: int, budget_s: float, chunk_tokens: int) -> float | None:
    """The least bytes/s of one interface with exposed transfer within the budget; None when even 100 TB/s would not do."""

    def fits(rate: float) -> bool:
        other = replace(wire, link=replace(wire.link, bytes_per_s=rate))
        return handoff_cost(cost, other, num_tokens, chunk_tokens=chunk_tokens).exposed_s <= budget_s

    low, high = 1e6, 1e14
    if not fits(high):
        return None
    for _ in range(50):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _change(what: str, plan: Plan) -> Change:
    outcome = plan.outcome
    return Change(
        what,
        1e3 * plan.ttft_s,
        1e3 * plan.tpot_s,
        outcome.goodput_per_s,
        outcome.slo_attainment,
        plan.meets,
        outcome.bottleneck,
    )


def _gbit(bytes_per_s: float) -> float:
    return 8 * bytes_per_s / 1e9


def _optional(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else _gbit(bytes_per_s)
