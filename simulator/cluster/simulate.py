"""Builds a cluster from its spec, runs it over requests, and reads what it shows. Knows the parts; decides nothing itself."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from shoal.simulator.cluster.autoscaler import Autoscaler
from shoal.simulator.cluster.decode_node import DecodeNode
from shoal.simulator.cluster.events import EventLoop
from shoal.simulator.cluster.failures import Failures
from shoal.simulator.cluster.front_door import FrontDoor
from shoal.simulator.cluster.gate import Gate
from shoal.simulator.cluster.histogram import LogHistogram
from shoal.simulator.cluster.life import Life
from shoal.simulator.cluster.network import Network
from shoal.simulator.cluster.outcome import Outcome, Percentiles, RequestLog, Resized, Resource, curve
from shoal.simulator.cluster.prefill_node import PrefillNode
from shoal.simulator.cluster.spec import AutoscaleSpec, ClusterSpec, FailureSpec
from shoal.simulator.cluster.workers import Workers
from shoal.simulator.workload.requests import SimRequest, in_order

Progress = Callable[[int, float], None]  # requests ended, simulated seconds
GiveUp = Callable[[RequestLog], bool]  # asked now and then; True ends the simulation early


def simulate(
    spec: ClusterSpec,
    requests: Iterator[SimRequest],
    *,
    seed: int = 0,
    lines: TextIO | None = None,
    give_up: GiveUp | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run all requests to their end. The same spec, requests and seed give the same outcome to the last digit.

    Raises InvalidConfig when the model does not fit a worker or the requests are out of order.
    """
    if spec.is_colocated and spec.visibility.late:
        spec = replace(spec, visibility=replace(spec.visibility, late=False))  # nothing is shipped, so nothing is late
    log, loop, gaps = RequestLog(spec.slo, lines), EventLoop(), LogHistogram()
    door = FrontDoor(
        shape=spec.model.shape,
        visibility=spec.visibility,
        requests=in_order(requests),
        rng=random.Random(f"{seed}/balance"),
        log=log.ended,
        reserve_tokens=spec.reserve_tokens,
        max_retries=spec.max_retries,
        disaggregation=spec.disaggregation,
        local_fallback=spec.local_fallback,
        request_s=spec.request_s,
    )
    if spec.max_wait_s is not None:
        door.gate = Gate(spec.max_wait_s, door.decode, door.prefill, door.prefill_owed)
    workers = Workers(spec, door, Network(spec.fabric_bytes_per_s), gaps)
    workers.add_all()
    failures = Failures(spec.failures or FailureSpec(), door, seed)
    scaler = Autoscaler(spec.autoscale or AutoscaleSpec(), workers, spec.slo)
    loop.add([*door.first(), *failures.first(), *(scaler.first() if spec.autoscale is not None else [])])
    gave_up = False

    def watch(now: float) -> bool:
        nonlocal gave_up
        if progress is not None:
            progress(log.num_ended, now)
        gave_up = give_up is not None and give_up(log)
        return gave_up

    loop.run(watch)
    if not gave_up:
        for node in workers.nodes:
            node.holders.check_idle()
    return _outcome(spec, workers, log, loop, tuple(scaler.resized), failures.num_deaths, gave_up=gave_up)


def _outcome(
    spec: ClusterSpec,
    workers: Workers,
    log: RequestLog,
    loop: EventLoop,
    resized: tuple[Resized, ...],
    num_deaths: int,
    *,
    gave_up: bool,
) -> Outcome:
    seconds, gaps = max(log.last_finish_s, 1e-9), workers.gaps
    resources = tuple(_resources(spec, workers, seconds))
    hours, prices = seconds / 3600, list(workers.prices(seconds))
    price = None if any(each is None for each in prices) else sum(each or 0.0 for each in prices) / hours
    num_tokens = log.num_prompt_tokens + log.num_output_tokens

    def per_million(tokens: int) -> float | None:
        return None if price is None or not tokens else price * hours / tokens * 1e6

    itl = [gaps.percentile(share) for share in (0.5, 0.9, 0.95, 0.99)]
    return Outcome(
        num_finished=log.num_finished,
        num_refused=log.refused.total(),
        refused=dict(sorted(log.refused.items())),
        num_retries=log.num_retries,
        duration_s=seconds,
        ttft_s=Percentiles.of(log.ttft_s),
        tpot_s=Percentiles.of(log.tpot_s),
        itl_s=Percentiles(gaps.mean, *itl),
        queueing_s=Percentiles.of(log.queueing_s),
        exposed_s=Percentiles.of(log.exposed_s),
        slo_attainment=log.num_within_slo / log.num_ended if log.num_ended else 0.0,
        goodput_per_s=log.num_within_slo / seconds,
        output_tokens_per_s=log.num_output_tokens / seconds,
        total_tokens_per_s=num_tokens / seconds,
        wire_bytes=log.wire_bytes,
        cached_share=log.num_cached_tokens / log.num_prompt_tokens if log.num_prompt_tokens else 0.0,
        resources=resources,
        bottleneck=max(resources, key=lambda resource: resource.mean).name,
        num_gpus=spec.num_gpus,
        usd_per_hour=price,
        usd_per_million_output=per_million(log.num_output_tokens),
        usd_per_million_tokens=per_million(num_tokens),
        num_events=loop.num_run,
        ttft_curve_s=curve(log.ttft_s),
        tpot_curve_s=curve(log.tpot_s),
        gave_up=gave_up,
        num_deaths=num_deaths,
        resized=resized,
        num_resumed=log.num_resumed,
        gpu_hours=sum(workers.gpu_hours(seconds)),
        num_preempted=log.num_preempted,
    )


def _resources(spec: ClusterSpec, workers: Workers, seconds: float) -> Iterator[Resource]:
    """Each resource at its fullest worker. A decode worker that steps is not full: its batch and its memory are what fill up."""
    door = workers.door
    decode, prefill = list(door.decode.values()), list(door.prefill.values())
    kind = "colocated" if spec.is_colocated else "decode"

    def fullest(shares: "Iterable[tuple[float, Life]]") -> float:
        return max(busy / life.seconds(seconds) for busy, life in shares)

    if prefill:
        yield Resource("prefill compute", "busy time", fullest((node.busy_s, node.life) for node in prefill))
        yield _memory("prefill KV memory", prefill, seconds)
        lives = {node.name: node.life for node in workers.nodes}
        ports = ((port.sent_bytes / port.bytes_per_s, lives[port.name]) for port in door.ports.values())
        yield Resource("link", "busy time of the fullest port", fullest(ports))
    else:
        prompts = fullest((node.prompt_s, node.life) for node in decode)
        yield Resource("prompt compute", "time in steps with prompt tokens", prompts)
    batch = fullest((node.row_seconds / node.holders.max_running, node.life) for node in decode)
    yield Resource(f"{kind} batch places", "rows of max_running", batch)
    yield _memory(f"{kind} KV memory", decode, seconds)


def _memory(name: str, nodes: "Sequence[DecodeNode | PrefillNode]", seconds: float) -> Resource:
    mean = max(node.holders.block_seconds / node.holders.blocks.num_blocks / node.life.seconds(seconds) for node in nodes)
    peak = max(node.holders.peak_blocks / node.holders.blocks.num_blocks for node in nodes)
    return Resource(name, "blocks reserved", mean, peak)
