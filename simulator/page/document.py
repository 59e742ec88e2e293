"""A search's result as the JSON that the page draws. Knows what the page shows; draws and computes nothing new."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shoal.placement.arithmetic import num_decode_tokens
from shoal.simulator.cluster.report import describe_short, resource_rows, time_rows
from shoal.simulator.planning.candidates import Family, Options
from shoal.simulator.planning.demand import Demand
from shoal.simulator.planning.search import Plan, SearchResult
from shoal.simulator.planning.sensitivity import Change, LinkNeed
from shoal.simulator.step_cost import StepCost, chunks
from shoal.simulator.transfer_cost import Wire, timeline
from shoal.visibility import VisibilityKind


def document(
    options: Options,
    demand: Demand,
    result: SearchResult,
    advice: str,
    changes: Sequence[Change],
    needs: Sequence[LinkNeed],
) -> dict[str, Any]:
    """Everything on the page, as plain JSON values. Plans are in order of cost; `front` and `best` are their indices."""
    plans = sorted(result.plans, key=lambda plan: (plan.cost, plan.ttft_s, plan.tpot_s))
    has_prices = all(plan.outcome.usd_per_hour is not None for plan in plans)
    best = result.best_split or result.best
    num_tokens = demand.prompt_quantile(options.quantile)
    return {
        "advice": advice,
        "asked": {
            "model": options.model.name,
            "GPUs": ", ".join(dict.fromkeys(machine.gpu.name for machine in options.machines)),
            "requests": f"{len(demand.requests):,} at {demand.rate:.2f}/s",
            "mean prompt": f"{demand.mean_prompt:,.0f} tokens",
            "mean output": f"{demand.mean_output:,.0f} tokens",
            "targets": f"TTFT {1e3 * options.slo.ttft_s:g} ms, TPOT {1e3 * options.slo.tpot_s:g} ms",
            "at": f"{100 * options.quantile:g}% of requests",
            "simulated": f"{result.num_simulated} clusters",
        },
        "ttft_target_ms": 1e3 * options.slo.ttft_s,
        "tpot_target_ms": 1e3 * options.slo.tpot_s,
        "quantile": options.quantile,
        "cost_unit": "USD per hour" if has_prices else "GPUs",
        "plans": [_plan(plan, num_tokens, round(demand.mean_output)) for plan in plans],
        "front": [index for index, plan in enumerate(plans) if plan in result.front],
        "best": plans.index(best) if best is not None else 0,
        "changes": [asdict(change) for change in changes],
        "needs": [asdict(need) for need in needs],
        "ruled_out": [f"{_family(rejection.family)}: {rejection.reason}" for rejection in result.rejections],
    }


def _plan(plan: Plan, num_tokens: int, num_output: int) -> dict[str, Any]:
    outcome = plan.outcome
    return {
        "name": describe_short(plan.family.spec(max(1, plan.num_prefill), plan.num_decode)),
        "cost": plan.cost,
        "gpus": plan.num_gpus,
        "usd_per_million": outcome.usd_per_million_output,
        "ttft_ms": 1e3 * plan.ttft_s,
        "tpot_ms": 1e3 * plan.tpot_s,
        "meets": plan.meets,
        "not_runnable": plan.not_runnable,
        "attainment": outcome.slo_attainment,
        "fullest": outcome.bottleneck,
        "times": [asdict(row) for row in time_rows(outcome)],
        "resources": [asdict(row) for row in resource_rows(outcome)],
        "ttft_curve_ms": [1e3 * value for value in outcome.ttft_curve_s],
        "tpot_curve_ms": [1e3 * value for value in outcome.tpot_curve_s],
        "timeline": _timeline(plan.family, num_tokens),
        "memory": _memory(plan.family, num_tokens, num_output),
    }


def _timeline(family: Family, num_tokens: int) -> dict[str, Any]:
    """One prompt's messages over an idle link, those of a layer taken together."""
    cost = StepCost(family.model, family.prefill or family.decode, family.visibility)
    num_prefill = family.visibility.split(num_tokens).num_prefill_tokens
    end_ms = 1e3 * cost.prefill_s(num_prefill, chunk_tokens=family.token_budget)
    last = chunks(0, num_prefill, family.token_budget)[-1:]
    last_ms = end_ms - sum(1e3 * cost.chunk(*chunk).total_s for chunk in last)
    layers: dict[str, dict[str, float]] = {}
    if family.prefill is not None and family.link is not None:
        wire = Wire.of(family.link, family.prefill, family.num_nics)
        for send in timeline(cost, wire, num_tokens, chunk_tokens=family.token_budget):
            label = "deep states" if send.layer is None else f"layer {send.layer}"
            layer = layers.setdefault(label, {"first_ready_ms": 1e3 * send.ready_s, "done_ms": 0.0, "bytes": 0.0})
            layer["done_ms"] = 1e3 * send.done_s
            layer["last_ready_ms"] = 1e3 * send.ready_s
            layer["bytes"] += send.num_bytes
    rows = [{"name": name, **row} for name, row in layers.items()]
    return {"prompt_tokens": num_tokens, "prefill_ms": end_ms, "last_chunk_ms": last_ms, "layers": rows}


def _memory(family: Family, num_tokens: int, num_output: int) -> dict[str, float]:
    """KV bytes of one request on the decode side, at its last token: lower and upper layers, prompt and answer."""
    split, num_layers = family.visibility.split(num_tokens), family.model.shape.num_layers
    depth = family.visibility.depth(num_layers)
    size = family.model.kv_token_bytes * family.decode.replication(family.model)
    decode = num_decode_tokens(family.visibility, num_tokens, num_output)
    is_speed = family.visibility.kind is VisibilityKind.SPEED
    upper_prompt = split.num_anchor_tokens if is_speed else split.num_prefill_tokens
    return {
        "depth": depth,
        "num_layers": num_layers,
        "lower_prompt_bytes": size * depth * split.num_prefill_tokens,
        "lower_answer_bytes": size * depth * decode,
        "upper_prompt_bytes": size * (num_layers - depth) * upper_prompt,
        "upper_answer_bytes": size * (num_layers - depth) * decode,
    }


def _family(family: Family) -> str:
    return describe_short(family.spec(1, 1)).replace("1P ", "P ").replace("1D ", "D ").replace("1× ", "")
