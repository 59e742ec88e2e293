"""A day of traffic on one simulated cluster under four ways to size its pools: `python -m benchmarks.autoscaling`.

Sized once for the peak, sized once for the mean, scaled by a threshold of utilisation (the rule of Kubernetes'
HorizontalPodAutoscaler), scaled by predicted need (the rule of the live controller). The day: a night's low and an afternoon's
high, Poisson, a ramp at nine and ten minutes at twice the rate in the evening. Lengths are those of a trace (--trace), drawn
with replacement, else log-normal with the mean and CV of Azure's public conversation trace of 2023.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.placement.autoscale import AutoscalePolicy, PoolDemand, need
from shoal.placement.need import DecodeReadings, PrefillReadings, Targets, decode_demand, prefill_demand
from shoal.placement.tally import SizeCounts, Sizes
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.cluster.outcome import Outcome
from shoal.simulator.cluster.simulate import simulate
from shoal.simulator.cluster.spec import AutoscaleSpec, ClusterSpec, PoolSpec, Slo, num_kv_blocks
from shoal.simulator.machine import Machine
from shoal.simulator.profiles import default_profile
from shoal.simulator.service import CostService
from shoal.simulator.step_cost import StepCost
from shoal.simulator.workload.requests import SimRequest
from shoal.simulator.workload.trace_files import TraceNotes, read_trace
from shoal.visibility import Visibility

HOUR = 3600.0
WAYS = ("static-peak", "static-mean", "utilisation", "need")
_AZURE = ((1155.0, 1.05), (211.0, 0.77))  # mean and CV of prompts and answers


def shape(hour: float) -> float:
    """The rate at an hour of the day, as a multiple of its mean (nearly)."""
    value = 1 + 0.7 * math.sin(2 * math.pi * (hour - 9) / 24)
    value += 0.35 / (1 + math.exp(-(hour - 9) * 20)) * math.exp(-max(0.0, hour - 9) / 2)  # people come to work
    return value * (2.0 if 20.5 <= hour < 20.5 + 1 / 6 else 1.0)


PEAK = max(shape(minute / 60) for minute in range(24 * 60) if not 1230 <= minute < 1240)  # the ten minutes are no plan


def lengths(trace: Path | None) -> list[tuple[int, int]]:
    """(prompt, answer) pairs to draw from."""
    if trace is not None:
        return [(each.num_prompt_tokens, each.num_output_tokens) for each in read_trace(trace, TraceNotes())]
    rng = random.Random("lengths")
    pairs = []
    for _ in range(20_000):
        drawn = []
        for mean, cv in _AZURE:
            sigma2 = math.log(1 + cv**2)
            drawn.append(max(1, round(rng.lognormvariate(math.log(mean) - sigma2 / 2, math.sqrt(sigma2)))))
        pairs.append((min(drawn[0], 14_000), min(drawn[1], 1_000)))
    return pairs


def day(rate: float, pairs: Sequence[tuple[int, int]], hours: tuple[float, float], seed: int) -> Iterator[SimRequest]:
    """Arrivals between two hours of the day, by thinning."""
    times, sizes = random.Random(f"{seed}/times"), random.Random(f"{seed}/sizes")
    most, now = 4.0 * rate, 0.0
    while (now := now + times.expovariate(most)) < (hours[1] - hours[0]) * HOUR:
        if times.random() * 4.0 < shape(hours[0] + now / HOUR):
            yield SimRequest(now, *sizes.choice(pairs))


@dataclass(frozen=True)
class Lab:
    """What every way has in common."""

    cluster: ClusterSpec
    pairs: Sequence[tuple[int, int]]
    rate: float
    hours: tuple[float, float]
    start_s: float
    most: int
    seed: int
    backlog_s: float

    def policy(self, least: int = 1) -> AutoscalePolicy:
        return AutoscalePolicy(least, self.most, drain_s=self.backlog_s, up_cooldown_s=15, down_cooldown_s=300, hysteresis=0.1)

    def sizes_for(self, rate: float) -> tuple[int, int]:
        """What the need says of a steady rate: how the static clusters are sized."""
        machine, spec = self.cluster.decode[0].machine, self.cluster
        cost = StepCost(spec.model, machine, spec.visibility)
        service = CostService(cost, cost, self.cluster.prefill[0].token_budget)
        targets = Targets(spec.slo.ttft_s, spec.slo.tpot_s)
        prompts, answers = SizeCounts(), SizeCounts()
        for prompt, answer in self.pairs:
            prompts.add(spec.visibility.split(prompt).num_prefill_tokens)
            answers.add(answer)
        layers = spec.model.shape.num_layers
        context = prompts.total / len(self.pairs) + answers.total / len(self.pairs)
        blocks = num_kv_blocks(spec.model, spec.visibility, machine, spec.block_size, prefill_only=False)
        hold_s = answers.total / len(self.pairs) * spec.slo.tpot_s
        told = DecodeReadings(
            arrivals_per_s=rate, answers=Sizes(tuple(answers.by_size), answers.total), max_rows=256, mean_hold_s=hold_s,
            blocks_per_request=context * layers / spec.block_size, blocks_per_worker=blocks, pairs_per_row=context * layers,
        )  # fmt: skip
        asked = PrefillReadings(rate, Sizes(tuple(prompts.by_size), prompts.total))

        def size(demand: PoolDemand) -> int:
            return min(self.most, need(self.policy(), demand).num_workers)

        return size(prefill_demand(asked, service, targets)), size(decode_demand(told, service, targets))

    def run(self, way: str) -> Outcome:
        """One way through the day."""
        begin = self.sizes_for(self.rate * (PEAK if way == "static-peak" else 1.0))
        spec = replace(
            self.cluster,
            prefill=(replace(self.cluster.prefill[0], count=begin[0]),),
            decode=(replace(self.cluster.decode[0], count=begin[1]),),
        )
        if way == "utilisation":
            spec = replace(spec, autoscale=AutoscaleSpec(self.policy(), self.policy(), 15.0, self.start_s, utilisation=0.7))
        elif way == "need":
            spec = replace(spec, autoscale=AutoscaleSpec(self.policy(), self.policy(), 5.0, self.start_s))
        return simulate(spec, day(self.rate, self.pairs, self.hours, self.seed), seed=self.seed)


def row(way: str, outcome: Outcome, begin: tuple[int, int]) -> str:
    """One line of the table."""
    sizes = []
    for pool, first in zip(("prefill", "decode"), begin, strict=True):
        seen = [first, *(each.num_workers for each in outcome.resized if each.pool == pool)]
        sizes.append(f"{min(seen)}–{max(seen)}" if len(set(seen)) > 1 else str(first))
    ttft, tpot = outcome.ttft_s, outcome.tpot_s
    cells = (
        way, *sizes, f"{outcome.slo_attainment:.2%}", f"{outcome.gpu_hours:.0f}", f"{1e3 * (ttft.p95 or 0):.0f}",
        f"{1e3 * (ttft.p99 or 0):.0f}", f"{1e3 * (tpot.p95 or 0):.0f}", f"{outcome.num_refused}", f"{len(outcome.resized)}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| way | prefill | decode | both targets met | GPU-hours | TTFT p95, ms | p99 | TPOT p95, ms | refused | resized |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscaling", description=__doc__)
    parser.add_argument("--trace", type=Path, help="requests whose lengths are drawn (formats of `shoal simulate --trace`)")
    parser.add_argument("--rate", type=float, default=2.0, help="mean requests per second")
    parser.add_argument("--hours", default="0-24", help="of the day, as in 8-12")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="L4")
    parser.add_argument("--link", default="25gbe")
    parser.add_argument("--visibility", default="full")
    parser.add_argument("--ttft", type=float, default=1.5, help="target, s")
    parser.add_argument("--tpot", type=float, default=0.1, help="target, s")
    parser.add_argument("--start", type=float, default=120.0, help="seconds until a new worker serves")
    parser.add_argument("--most", type=int, default=24, help="workers of a pool")
    parser.add_argument("--backlog", type=float, default=10.0, help="seconds within which what waits should be worked off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", action="append", choices=WAYS, help="only this one; may be given again")
    flags = parser.parse_args(arguments)
    names = Catalogues.shipped()
    gpu = names.gpu(flags.gpu)
    pool = PoolSpec(Machine(gpu, default_profile(gpu.name)), 1)
    cluster = ClusterSpec(
        names.model(flags.model),
        replace(Visibility.parse(flags.visibility), boundary_tokens=1),
        (pool,),
        (pool,),
        names.link(flags.link),
        block_size=128,
        slo=Slo(flags.ttft, flags.tpot),
        max_wait_s=60.0,
    )
    first, _, last = flags.hours.partition("-")
    hours = (float(first), float(last))
    lab = Lab(cluster, lengths(flags.trace), flags.rate, hours, flags.start, flags.most, flags.seed, flags.backlog)
    count = sum(1 for _ in day(flags.rate, lab.pairs, hours, flags.seed))
    print(f"{count:,} requests of {hours[1] - hours[0]:g} h, {len(lab.pairs):,} lengths; {flags.model} on {gpu.name}", flush=True)
    print(HEAD, flush=True)
    for way in flags.way or WAYS:
        began_at = time.monotonic()
        outcome = lab.run(way)
        begin = lab.sizes_for(lab.rate * (PEAK if way == "static-peak" else 1.0))
        print(row(way, outcome, begin), flush=True)
        print(f"{way}: {time.monotonic() - began_at:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
