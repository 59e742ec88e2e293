"""Flows over ports that share bandwidth fairly. Knows bytes, ports and time; knows no layers and no requests.

A flow's rate is its fair share: min(egress / flows leaving there, ingress / flows arriving there, fabric / all flows). Flows are
fluid: what has been added and not yet sent moves at that rate. Shares change only when a flow becomes busy or idle.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from shoal.simulator.cluster.events import Event

_EPSILON_BYTES = 1e-3


@dataclass(slots=True, eq=False)
class Port:
    """One end of a worker's network."""

    name: str
    bytes_per_s: float
    sent_bytes: float = 0.0  # with the time of latencies counted as bytes
    num_busy: int = 0


@dataclass(slots=True, eq=False)
class Flow:
    """What one request ships. `done` is called with the time once all has been added and sent."""

    source: Port
    sink: Port
    done: Callable[[float], Iterable[Event]]
    pending_bytes: float = 0.0
    bytes_per_s: float = 0.0
    is_closed: bool = False
    is_busy: bool = False
    ports: tuple[Port, Port] = field(init=False)

    def __post_init__(self) -> None:
        self.ports = (self.source, self.sink)

    @property
    def alone_bytes_per_s(self) -> float:
        """The rate without others."""
        return min(self.source.bytes_per_s, self.sink.bytes_per_s)


def _nothing(now: float) -> Iterable[Event]:
    return ()


class Network:
    """All flows that have bytes to send now."""

    def __init__(self, fabric_bytes_per_s: float | None = None) -> None:
        self._fabric = fabric_bytes_per_s
        self._busy: list[Flow] = []
        self._settled_s = 0.0
        self._plan = 0  # events of older plans are void

    def send(self, flow: Flow, num_bytes: float, now: float) -> list[Event]:
        """More bytes of an open flow are ready."""
        self._settle(now)
        if not flow.is_busy and num_bytes > 0:
            flow.is_busy = True
            self._busy.append(flow)
            for port in flow.ports:
                port.num_busy += 1
        flow.pending_bytes += num_bytes
        return self._replan(now)

    def cancel(self, flow: Flow, now: float) -> list[Event]:
        """An end of the flow is gone: send no more of it, and never say that it is done."""
        self._settle(now)
        flow.done = _nothing
        if flow.is_busy:
            self._busy.remove(flow)
            flow.is_busy = False
            for port in flow.ports:
                port.num_busy -= 1
        return self._replan(now)

    def close(self, flow: Flow, now: float) -> list[Event]:
        """Nothing will be added."""
        flow.is_closed = True
        if flow.is_busy:
            return []
        return [(now, flow.done)]

    def _tick(self, plan: int, now: float) -> list[Event]:
        if plan != self._plan:
            return []
        self._settle(now)
        idle = [flow for flow in self._busy if flow.pending_bytes <= _EPSILON_BYTES + 1e-9 * flow.bytes_per_s]
        events: list[Event] = []
        for flow in idle:
            self._busy.remove(flow)
            flow.is_busy = False
            flow.pending_bytes = 0.0
            for port in flow.ports:
                port.num_busy -= 1
            if flow.is_closed:
                events.append((now, flow.done))
        return events + self._replan(now)

    def _settle(self, now: float) -> None:
        elapsed, self._settled_s = now - self._settled_s, now
        for flow in self._busy:
            moved = min(flow.pending_bytes, flow.bytes_per_s * elapsed)
            flow.pending_bytes -= moved
            for port in flow.ports:
                port.sent_bytes += moved

    def _replan(self, now: float) -> list[Event]:
        self._plan += 1
        if not self._busy:
            return []
        for flow in self._busy:
            rate = min(port.bytes_per_s / port.num_busy for port in flow.ports)
            flow.bytes_per_s = rate if self._fabric is None else min(rate, self._fabric / len(self._busy))
        first = min(flow.pending_bytes / flow.bytes_per_s for flow in self._busy)
        return [(now + first, partial(self._tick, self._plan))]
