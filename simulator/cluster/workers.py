"""Makes a simulated cluster's workers, at the start or later. Knows the spec and what workers are made of."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.placement.blocks import BlockPool
from shoal.placement.prefix_cache import PrefixCache
from shoal.simulator.cluster.decode_node import DecodeNode
from shoal.simulator.cluster.front_door import FrontDoor
from shoal.simulator.cluster.histogram import LogHistogram
from shoal.simulator.cluster.holders import Holders
from shoal.simulator.cluster.life import Life
from shoal.simulator.cluster.network import Network, Port
from shoal.simulator.cluster.prefill_node import PrefillNode
from shoal.simulator.cluster.spec import ClusterSpec, PoolSpec, block_bytes, num_kv_blocks
from shoal.simulator.step_cost import StepCost
from shoal.simulator.transfer_cost import Wire

Node: TypeAlias = DecodeNode | PrefillNode


@dataclass(slots=True, eq=False)
class Workers:
    """Adds workers to a front door, named by pool, kind and number."""

    spec: ClusterSpec
    door: FrontDoor
    network: Network
    gaps: LogHistogram
    _made: dict[tuple[str, int], int] = field(default_factory=dict)

    def add_all(self) -> None:
        """The workers that the spec begins with."""
        for index, pool in enumerate(self.spec.decode):
            for _ in range(pool.count):
                self.add_decode(index)
        for index, pool in enumerate(self.spec.prefill):
            for _ in range(pool.count):
                self.add_prefill(index)

    def add_decode(self, index: int = 0, now: float = 0.0) -> DecodeNode:
        """One more worker of decode pool `index` (colocated where there is no prefill)."""
        spec, pool = self.spec, self.spec.decode[index]
        name = self._name("worker" if spec.is_colocated else "decode", index)
        cost, holders = StepCost(spec.model, pool.machine, spec.visibility), self._holders(pool, prefill_only=False)
        node = DecodeNode(
            name, cost, holders, pool.token_budget, self.gaps, self.door, spec.is_colocated, spec.preemption, Life(now)
        )
        self.door.ports[name] = Port(name, 1.0 if spec.is_colocated else self._wire(pool).bytes_per_s)
        self.door.decode[name] = node
        if pool.machine.profile.crowd_decode or pool.machine.profile.join_s:
            node.neighbours = self.door.prefill
        return node

    def add_prefill(self, index: int = 0, now: float = 0.0) -> PrefillNode:
        """One more worker of prefill pool `index`."""
        spec, pool = self.spec, self.spec.prefill[index]
        name = self._name("prefill", index)
        wire, cost = self._wire(pool), StepCost(spec.model, pool.machine, spec.visibility)
        port = self.door.ports[name] = Port(name, wire.bytes_per_s)
        holders = self._holders(pool, prefill_only=True)
        node = PrefillNode(
            name, cost, holders, self.network, port, pool.token_budget, wire.latency_s, wire.handoff_s, Life(now)
        )  # fmt: skip
        self.door.prefill[name] = node
        profile = pool.machine.profile
        if profile.crowd_prefill or profile.crowd_decode or profile.join_s:
            node.neighbours = self.door.decode
        return node

    @property
    def nodes(self) -> list[Node]:
        """Every worker there is or was."""
        return [*self.door.decode.values(), *self.door.prefill.values()]

    def prices(self, end_s: float) -> Iterator[float | None]:
        """USD that each worker has cost by the end; None where it has no price."""
        for node in self.nodes:
            per_hour = node.cost.machine.usd_per_hour
            yield None if per_hour is None else per_hour * node.life.seconds(end_s) / 3600

    def gpu_hours(self, end_s: float) -> Iterator[float]:
        """Of each worker by the end: from when it was ordered until it was given back."""
        for node in self.nodes:
            yield node.cost.machine.tensor_parallel * node.life.seconds(end_s) / 3600

    def _name(self, kind: str, index: int) -> str:
        number = self._made[kind, index] = self._made.get((kind, index), -1) + 1
        return f"{kind}-{index}-{number}"

    def _wire(self, pool: PoolSpec) -> Wire:
        assert self.spec.link is not None
        return Wire.of(self.spec.link, pool.machine, self.spec.num_nics)

    def _holders(self, pool: PoolSpec, *, prefill_only: bool) -> Holders:
        spec = self.spec
        num_blocks = num_kv_blocks(spec.model, spec.visibility, pool.machine, spec.block_size, prefill_only=prefill_only)
        size, blocks = block_bytes(spec.model, pool.machine, spec.block_size), BlockPool(num_blocks)
        has_cache = spec.prefill_cache if prefill_only else spec.decode_cache
        cache = PrefixCache(blocks, spec.block_size) if has_cache else None
        grows = 0 if prefill_only or not spec.preemption else spec.model.shape.num_layers
        return Holders(blocks, spec.block_size, size, pool.max_running, pool.max_queued, cache, grows)
