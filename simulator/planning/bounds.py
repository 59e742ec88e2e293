"""What no number of workers can beat, and how many are needed at least. Knows formulas 1–4; simulates nothing.

TTFT and TPOT of a request grow with its prompt, and a share 1 − q of the requests is at least as long as the q-quantile. So the
q-quantile of TTFT (TPOT) is at least what that prompt takes alone on idle workers.
"""

from dataclasses import dataclass
from math import ceil, floor

from shoal.placement.reservation import decode_reservation
from shoal.simulator.cluster.spec import num_kv_blocks
from shoal.simulator.planning.candidates import Family
from shoal.simulator.planning.demand import Demand
from shoal.simulator.request_cost import colocated_ttft_s, decode_step_s, first_step_s
from shoal.simulator.step_cost import StepCost
from shoal.simulator.transfer_cost import Wire, handoff_bytes, handoff_cost
from shoal.types import DType

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one family under one demand. `impossible` says in words which target cannot be met and by how much; "" = none known."""

    ttft_s: float
    tpot_s: float
    num_prefill: int
    num_decode: int
    impossible: str


def bounds(family: Family, demand: Demand, quantile: float) -> Bounds:
    """Lower bounds. `num_prefill` is 0 for a colocated family."""
    num_tokens = demand.prompt_quantile(quantile)
    decode = StepCost(family.model, family.decode, family.visibility)
    first_s = first_step_s(decode, num_tokens)
    tpot_s = decode_step_s(decode, 1, num_tokens)
    prefill_machine = family.prefill or family.decode
    prefill = StepCost(family.model, prefill_machine, family.visibility)
    num_prefill_tokens = family.visibility.split(num_tokens).num_prefill_tokens
    prefill_s = prefill.prefill_s(num_prefill_tokens, chunk_tokens=family.token_budget)
    exposed_s = 0.0
    if family.prefill is not None and family.link is not None:
        wire = Wire.of(family.link, family.prefill, family.num_nics)
        exposed_s = handoff_cost(prefill, wire, num_tokens, chunk_tokens=family.token_budget).exposed_s
    parts = f"prefill {1e3 * prefill_s:,.1f}, exposed transfer {1e3 * exposed_s:,.1f}, first step {1e3 * first_s:,.1f}"
    ttft_s = prefill_s + exposed_s + first_s
    if family.is_colocated:
        ttft_s, parts = colocated_ttft_s(decode, num_tokens, family.token_budget), "the first token comes with its last chunk"
    ttft_s += prefill_machine.profile.request_s
    slo, words = family.slo, []
    if ttft_s > slo.ttft_s:
        words.append(
            f"TTFT: a prompt of {num_tokens:,} tokens (the {quantile:g} quantile) takes at least {1e3 * ttft_s:,.1f} ms alone "
            f"({parts}), "
            f"{1e3 * (ttft_s - slo.ttft_s):,.1f} ms over the target of {1e3 * slo.ttft_s:g} ms"
        )
    if tpot_s > slo.tpot_s:
        words.append(
            f"TPOT: one request alone takes at least {1e3 * tpot_s:,.2f} ms per token after {num_tokens:,} prompt tokens, "
            f"{1e3 * (tpot_s - slo.tpot_s):,.2f} ms over the target of {1e3 * slo.tpot_s:g} ms"
        )
    prefill_load = demand.rate * _prefill_seconds(prefill, family, demand)
    decode_load = demand.rate * demand.mean_output / max(1e-9, _decode_tokens_per_s(decode, family, demand))
    if family.is_colocated:
        return Bounds(ttft_s, tpot_s, 0, max(1, ceil(prefill_load + decode_load)), "; ".join(words))
    link_load = _link_load(prefill, family, demand)
    num_prefill = floor(max(prefill_load, link_load)) + 1
    return Bounds(ttft_s, tpot_s, num_prefill, max(1, ceil(decode_load), floor(link_load) + 1), "; ".join(words))


def _prefill_seconds(cost: StepCost, family: Family, demand: Demand) -> float:
    """Mean seconds of prefill per request, prompts packed into steps of the token budget."""
    total = 0.0
    step: list[tuple[int, int]] = []
    room = family.token_budget
    for request in demand.sample:
        start, stop = 0, family.visibility.split(request.num_prompt_tokens).num_prefill_tokens
        while start < stop:
            cut = min(stop, start + room)
            step.append((start, cut))
            room -= cut - start
            start = cut
            if room == 0:
                total += cost.prefill_step(step).total_s
                step, room = [], family.token_budget
    return (total + cost.prefill_step(step).total_s) / len(demand.sample)


def _decode_tokens_per_s(cost: StepCost, family: Family, demand: Demand) -> float:
    """The most one worker can stream with steps within the TPOT target, its batch limit and its memory; 0.0 for none."""
    num_prompt, num_output = max(1, round(demand.mean_prompt)), max(1, round(demand.mean_output))
    shape = family.model.shape
    size = decode_reservation(shape, DType.BFLOAT16, _BLOCK_SIZE, family.visibility, num_prompt, num_output)
    blocks = num_kv_blocks(family.model, family.visibility, family.decode, _BLOCK_SIZE, prefill_only=False)
    low, high = 0, min(family.batch, blocks // size.num_blocks) + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = decode_step_s(cost, middle, num_prompt, num_output // 2 + 1) <= family.slo.tpot_s
        low, high = (middle, high) if fits else (low, middle)
    return low / decode_step_s(cost, low, num_prompt, num_output // 2 + 1) if low else 0.0


def _link_load(cost: StepCost, family: Family, demand: Demand) -> float:
    """How many workers' interfaces the transfers keep busy, at either end."""
    if family.link is None or family.prefill is None:
        return 0.0
    replication = family.prefill.replication(family.model)
    sizes = [
        handoff_bytes(family.model, family.visibility, request.num_prompt_tokens, replication=replication).total
        for request in demand.sample
    ]
    return demand.rate * sum(sizes) / len(sizes) / Wire.of(family.link, family.prefill, family.num_nics).bytes_per_s
