"""Pools that grow and shrink by placement's own rule, or, to compare, by a threshold of utilisation. Decides nothing itself.

The rule is told what the live controller is told (`placement/need.py`): arrivals, sizes of prompts and answers, what waits, rows
and blocks; the pace comes from the cost model that the simulation runs on. The threshold rule sees how busy workers are, as a
Kubernetes HorizontalPodAutoscaler sees CPUs (`utilisation.py`).
"""

from dataclasses import dataclass, field
from functools import partial

from shoal.placement.autoscale import AutoscalePolicy, PoolDemand, ScaleState, scale
from shoal.placement.history import PoolHistory
from shoal.placement.need import DecodeReadings, PrefillReadings, Targets, decode_demand, prefill_demand
from shoal.placement.tally import Tally
from shoal.simulator.cluster.decode_node import DecodeNode
from shoal.simulator.cluster.events import Event
from shoal.simulator.cluster.outcome import Resized
from shoal.simulator.cluster.prefill_node import PrefillNode
from shoal.simulator.cluster.spec import AutoscaleSpec, Slo
from shoal.simulator.cluster.utilisation import Threshold, sampled
from shoal.simulator.cluster.workers import Workers
from shoal.simulator.service import CostService

_Nodes = dict[str, PrefillNode] | dict[str, DecodeNode]


@dataclass(slots=True, eq=False)
class Autoscaler:
    """Looks at both pools every `interval_s`."""

    spec: AutoscaleSpec
    workers: Workers
    slo: Slo
    resized: list[Resized] = field(default_factory=list)
    _histories: dict[str, PoolHistory] = field(default_factory=dict)
    _seen: dict[str, Tally] = field(default_factory=dict)
    _states: dict[str, ScaleState] = field(default_factory=dict)
    _thresholds: dict[str, Threshold] = field(default_factory=dict)

    def first(self) -> list[Event]:
        """The first look."""
        if self.spec.utilisation is not None:
            self._thresholds = {pool: Threshold(self.spec.utilisation) for pool in ("prefill", "decode")}
            return [(self.spec.interval_s, self._look), (1.0, self._sample)]
        return [(self.spec.interval_s, self._look)]

    def _nodes(self, pool: str) -> _Nodes:
        return self.workers.door.prefill if pool == "prefill" else self.workers.door.decode

    def _sample(self, now: float) -> list[Event]:
        """Utilisation is the share of moments at which a worker steps."""
        for pool, threshold in self._thresholds.items():
            threshold.saw(sampled(self._nodes(pool).values()))
        return [] if self.workers.door.is_done else [(now + 1.0, self._sample)]

    def _look(self, now: float) -> list[Event]:
        door = self.workers.door
        if door.is_done:
            return []
        events: list[Event] = [(now + self.spec.interval_s, self._look)]
        for pool, policy in (("prefill", self.spec.prefill), ("decode", self.spec.decode)):
            nodes, tally = self._nodes(pool), door.tallies[pool]
            history = self._histories.setdefault(pool, PoolHistory())
            history.saw(tally.since(self._seen.get(pool, Tally())), self.spec.interval_s)
            self._seen[pool] = tally.copy()
            self._give_back(nodes, now)
            if policy is not None and nodes:
                events += self._resize(pool, policy, nodes, now)
        return events

    def _resize(self, pool: str, policy: AutoscalePolicy, nodes: _Nodes, now: float) -> list[Event]:
        staying = [node for node in nodes.values() if node.life.until_s is None and not node.life.is_draining]
        if self._thresholds:
            size = self._thresholds[pool].size(len(staying), policy, now)
        else:
            demand = self._prefill_demand() if pool == "prefill" else self._decode_demand(now)
            decision = scale(policy, demand, len(staying), now, self._states.get(pool, ScaleState()))
            self._states[pool], size = decision.state, decision.num_workers
        events: list[Event] = []
        for _ in range(size - len(staying)):
            node = self.workers.add_prefill(0, now) if pool == "prefill" else self.workers.add_decode(0, now)
            node.life.is_up = False
            events.append((now + self.spec.start_s, partial(_ready, node)))
        emptiest = sorted(staying, key=lambda node: (node.life.is_up, self._held(node)))
        for node in emptiest[: max(0, len(staying) - size)]:
            node.life.is_draining = True
        if size != len(staying):
            self.resized.append(Resized(now, pool, size))
        return events

    def _give_back(self, nodes: _Nodes, now: float) -> None:
        """Workers that have drained are paid for no longer."""
        for node in nodes.values():
            if node.life.is_draining and node.life.until_s is None and not self._held(node):
                node.life.until_s = now

    def _held(self, node: PrefillNode | DecodeNode) -> int:
        return len(self.workers.door.jobs_of(node.name))

    @property
    def _service(self) -> CostService:
        door = self.workers.door
        decode = next(iter(door.decode.values()))
        prefill = next(iter(door.prefill.values()), decode)
        return CostService(prefill.cost, decode.cost, prefill.token_budget)

    @property
    def _targets(self) -> Targets:
        return Targets(self.slo.ttft_s, self.slo.tpot_s)

    def _prefill_demand(self) -> PoolDemand:
        door, history = self.workers.door, self._histories["prefill"]
        nodes = [node for node in door.prefill.values() if node.life.is_ready]
        depth = next(iter(door.prefill.values())).cost.depth
        readings = PrefillReadings(
            history.forecast.per_s(self.spec.start_s),
            history.prompts,
            sum(map(door.prefill_owed, door.prefill)) / depth,
            sum(node.holders.reserved_share for node in nodes),
        )
        return prefill_demand(readings, self._service, self._targets)

    def _decode_demand(self, now: float) -> PoolDemand:
        history, all_nodes = self._histories["decode"], self.workers.door.decode.values()
        nodes = [node for node in all_nodes if node.life.is_ready]
        if not nodes:
            return PoolDemand(0.0, 0.0, 1.0)
        num_holders = sum(node.holders.num_holders for node in nodes)
        num_used = sum(node.holders.blocks.num_used for node in nodes)
        num_rows = sum(node.num_rows for node in nodes)
        readings = DecodeReadings(
            arrivals_per_s=history.forecast.per_s(self.spec.start_s),
            answers=history.answers,
            prompts=history.prompts,
            num_waiting=sum(node.holders.num_waiting for node in nodes),
            num_rows=num_rows,
            max_rows=min(node.holders.max_running for node in nodes),
            full=sum(max(node.holders.reserved_share, node.holders.num_holders / node.holders.max_running) for node in nodes),
            blocks_per_request=num_used / num_holders if num_holders else 0.0,
            blocks_per_worker=sum(node.holders.blocks.num_blocks for node in nodes) / len(nodes),
            mean_hold_s=sum(node.holders.mean_hold_s(now) for node in nodes) / len(nodes),
            pairs_per_row=sum(node.mean_pairs_read * node.num_rows for node in nodes) / num_rows if num_rows else 0.0,
        )
        return decode_demand(readings, self._service, self._targets)


def _ready(node: PrefillNode | DecodeNode, now: float) -> list[Event]:
    node.life.is_up = True
    return []
