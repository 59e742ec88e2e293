"""Builds a cluster from its spec, runs it over requests, and reads what it shows. Knows the parts; decides nothing itself."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TextIO

from shoal.placement.blocks import BlockPool
from shoal.simulator.cluster.decode_node import DecodeNode
from shoal.simulator.cluster.events import EventLoop
from shoal.simulator.cluster.front_door import FrontDoor
from shoal.simulator.cluster.histogram import LogHistogram
from shoal.simulator.cluster.holders import Holders
from shoal.simulator.cluster.network import Network, Port
from shoal.simulator.cluster.outcome import Outcome, Percentiles, RequestLog, Resource, curve
from shoal.simulator.cluster.prefill_node import PrefillNode
from shoal.simulator.cluster.prefix_cache import PrefixCache
from shoal.simulator.cluster.spec import ClusterSpec, PoolSpec, block_bytes, num_kv_blocks
from shoal.simulator.step_cost import StepCost
from shoal.simulator.transfer_cost import Wire
from shoal.simulator.workload.requests import SimRequest, in_order

Progress = Callable[[int, float], None]  # requests ended, simulated seconds
GiveUp = Callable[[RequestLog], bool]  # asked now and then; True ends the simulation early
_HASH_TOKENS = 512


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
    network = Network(spec.fabric_bytes_per_s)
    door = FrontDoor(
        shape=spec.model.shape,
        visibility=spec.visibility,
        requests=in_order(requests),
        rng=random.Random(f"{seed}/balance"),
        ended=log.ended,
        reserve_tokens=spec.reserve_tokens,
        max_retries=spec.max_retries,
    )
    for pool_index, pool in enumerate(spec.decode):
        for index in range(pool.count):
            name = f"{'worker' if spec.is_colocated else 'decode'}-{pool_index}-{index}"
            cost = StepCost(spec.model, pool.machine, spec.visibility)
            holders = _holders(spec, pool, prefill_only=False)
            door.decode[name] = DecodeNode(name, cost, holders, pool.token_budget, gaps, door, spec.is_colocated)
            door.ports[name] = Port(name, _wire(spec, pool).bytes_per_s if not spec.is_colocated else 1.0)
    for pool_index, pool in enumerate(spec.prefill):
        for index in range(pool.count):
            name = f"prefill-{pool_index}-{index}"
            wire, cost = _wire(spec, pool), StepCost(spec.model, pool.machine, spec.visibility)
            holders, cache = _holders(spec, pool, prefill_only=True), _cache(spec, pool)
            port = Port(name, wire.bytes_per_s)
            door.ports[name] = port
            latency, handoff = wire.latency_s, wire.handoff_s
            door.prefill[name] = PrefillNode(name, cost, holders, network, port, pool.token_budget, latency, handoff, cache)
    loop.add(door.first())
    gave_up = False

    def watch(now: float) -> bool:
        nonlocal gave_up
        if progress is not None:
            progress(log.num_ended, now)
        gave_up = give_up is not None and give_up(log)
        return gave_up

    loop.run(watch)
    if gave_up:
        return _outcome(spec, door, log, gaps, loop, gave_up=True)
    for holders in [node.holders for node in door.decode.values()] + [node.holders for node in door.prefill.values()]:
        holders.check_idle()
    return _outcome(spec, door, log, gaps, loop, gave_up=False)


def _wire(spec: ClusterSpec, pool: PoolSpec) -> Wire:
    assert spec.link is not None
    return Wire.of(spec.link, pool.machine, spec.num_nics)


def _holders(spec: ClusterSpec, pool: PoolSpec, *, prefill_only: bool) -> Holders:
    num_blocks = num_kv_blocks(spec.model, spec.visibility, pool.machine, spec.block_size, prefill_only=prefill_only)
    if prefill_only:
        num_blocks = max(1, int(num_blocks * (1 - spec.prefix_cache_share)))
    size = block_bytes(spec.model, pool.machine, spec.block_size)
    return Holders(BlockPool(num_blocks), spec.block_size, size, pool.max_running, pool.max_queued)


def _cache(spec: ClusterSpec, pool: PoolSpec) -> PrefixCache | None:
    if not spec.prefix_cache_share:
        return None
    num_blocks = num_kv_blocks(spec.model, spec.visibility, pool.machine, spec.block_size, prefill_only=True)
    depth = spec.visibility.depth(spec.model.shape.num_layers)
    return PrefixCache(int(num_blocks * spec.prefix_cache_share * spec.block_size / depth / _HASH_TOKENS))


def _outcome(
    spec: ClusterSpec, door: FrontDoor, log: RequestLog, gaps: LogHistogram, loop: EventLoop, *, gave_up: bool
) -> Outcome:
    seconds = max(log.last_finish_s, 1e-9)
    resources = tuple(_resources(spec, door, seconds))
    hours, price = seconds / 3600, spec.usd_per_hour
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
    )


def _resources(spec: ClusterSpec, door: FrontDoor, seconds: float) -> Iterator[Resource]:
    """Each resource at its fullest worker. A decode worker that steps is not full: its batch and its memory are what fill up."""
    decode, prefill = list(door.decode.values()), list(door.prefill.values())
    running = [pool.max_running for pool in spec.decode for _ in range(pool.count)]
    kind = "colocated" if spec.is_colocated else "decode"
    if prefill:
        yield Resource("prefill compute", "busy time", max(node.busy_s for node in prefill) / seconds)
        yield _memory("prefill KV memory", [node.holders for node in prefill], seconds)
        sent = max(port.sent_bytes / port.bytes_per_s for port in door.ports.values())
        yield Resource("link", "busy time of the fullest port", sent / seconds)
    else:
        yield Resource("prompt compute", "time in steps with prompt tokens", max(node.prompt_s for node in decode) / seconds)
    batch = max(node.row_seconds / limit for node, limit in zip(decode, running, strict=True))
    yield Resource(f"{kind} batch places", "rows of max_running", batch / seconds)
    yield _memory(f"{kind} KV memory", [node.holders for node in decode], seconds)


def _memory(name: str, holders: list[Holders], seconds: float) -> Resource:
    mean = max(holder.block_seconds / holder.blocks.num_blocks for holder in holders) / seconds
    peak = max(holder.peak_blocks / holder.blocks.num_blocks for holder in holders)
    return Resource(name, "blocks reserved", mean, peak)
