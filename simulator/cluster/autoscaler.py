"""Pools that grow and shrink by placement's own rule. Knows what the rule is told; decides nothing itself.

Prefill is told token-layers: those that arrive, those that wait, and what one worker runs in full steps. Decode is told how full
its workers are: rows against the largest batch that keeps the TPOT target, or reserved blocks, whichever is more.
"""

from dataclasses import dataclass, field
from functools import partial

from shoal.placement.autoscale import AutoscalePolicy, PoolDemand, ScaleState, scale
from shoal.simulator.cluster.decode_node import DecodeNode
from shoal.simulator.cluster.events import Event
from shoal.simulator.cluster.outcome import Resized
from shoal.simulator.cluster.prefill_node import PrefillNode
from shoal.simulator.cluster.spec import AutoscaleSpec
from shoal.simulator.cluster.workers import Workers
from shoal.simulator.step_cost import StepWork

_SMOOTHING = 0.5  # weight of the latest interval in the rate of arriving work


@dataclass(slots=True, eq=False)
class Autoscaler:
    """Looks at both pools every `interval_s`."""

    spec: AutoscaleSpec
    workers: Workers
    tpot_s: float
    resized: list[Resized] = field(default_factory=list)
    _states: dict[str, ScaleState] = field(default_factory=dict)
    _num_seen: int = 0
    _rate: float = 0.0

    def first(self) -> list[Event]:
        """The first look."""
        return [(self.spec.interval_s, self._look)]

    def _look(self, now: float) -> list[Event]:
        door = self.workers.door
        if door.is_done:
            return []
        latest = (door.num_offered_prefill - self._num_seen) / self.spec.interval_s
        self._num_seen = door.num_offered_prefill
        self._rate += _SMOOTHING * (latest - self._rate)
        events: list[Event] = [(now + self.spec.interval_s, self._look)]
        for pool, policy in (("prefill", self.spec.prefill), ("decode", self.spec.decode)):
            nodes: dict[str, PrefillNode] | dict[str, DecodeNode] = door.prefill if pool == "prefill" else door.decode
            self._give_back(nodes, now)
            if policy is not None and nodes:
                events += self._resize(pool, policy, nodes, now)
        return events

    def _resize(
        self, pool: str, policy: AutoscalePolicy, nodes: "dict[str, PrefillNode] | dict[str, DecodeNode]", now: float
    ) -> list[Event]:
        staying = [node for node in nodes.values() if node.life.until_s is None and not node.life.is_draining]
        demand = self._prefill_demand() if pool == "prefill" else self._decode_demand()
        decision = scale(policy, demand, len(staying), now, self._states.get(pool, ScaleState()))
        self._states[pool] = decision.state
        events: list[Event] = []
        for _ in range(decision.num_workers - len(staying)):
            node = self.workers.add_prefill(0, now) if pool == "prefill" else self.workers.add_decode(0, now)
            node.life.is_up = False
            events.append((now + self.spec.start_s, partial(_ready, node)))
        for node in sorted(staying, key=lambda node: (node.life.is_up, self._held(node)))[: len(staying) - decision.num_workers]:
            node.life.is_draining = True
        if decision.num_workers != len(staying):
            self.resized.append(Resized(now, pool, decision.num_workers))
        return events

    def _give_back(self, nodes: "dict[str, PrefillNode] | dict[str, DecodeNode]", now: float) -> None:
        """Workers that have drained are paid for no longer."""
        for node in nodes.values():
            if node.life.is_draining and node.life.until_s is None and not self._held(node):
                node.life.until_s = now

    def _held(self, node: PrefillNode | DecodeNode) -> int:
        return len(self.workers.door.jobs_of(node.name))

    def _prefill_demand(self) -> PoolDemand:
        door = self.workers.door
        node = next(iter(door.prefill.values()))
        capacity = node.cost.depth * node.token_budget / node.cost.chunk(0, node.token_budget).total_s
        return PoolDemand(self._rate, sum(map(door.prefill_owed, door.prefill)), capacity)

    def _decode_demand(self) -> PoolDemand:
        nodes = [node for node in self.workers.door.decode.values() if node.life.is_ready]
        if not nodes:
            return PoolDemand(0.0, 0.0, 1.0)
        shares = [max(node.num_rows / self._most_rows(node), node.holders.reserved_share) for node in nodes]
        return PoolDemand(0.0, 0.0, 1.0, min(1.0, sum(shares) / len(shares)))

    def _most_rows(self, node: DecodeNode) -> int:
        """The largest batch that keeps the TPOT target with the KV that its rows read now."""
        read = node.mean_pairs_read
        low, high = 1, node.holders.max_running + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = node.cost.step_s(StepWork(num_rows=middle, num_kv_layer_tokens=middle * read)) <= self.tpot_s
            low, high = (middle, high) if fits else (low, middle)
        return low


def _ready(node: PrefillNode | DecodeNode, now: float) -> list[Event]:
    node.life.is_up = True
    return []
