"""Scaling by a threshold of utilisation, to compare with: the rule of Kubernetes' HorizontalPodAutoscaler. Knows no prediction.

desired = ceil(workers · utilisation / target), nothing within the tolerance of 10 %, and on the way down the largest of what was
desired within the stabilisation window (kubernetes.io, "Horizontal Pod Autoscaling", algorithm details and defaults: 15 s between
looks, 300 s of stabilisation). A worker is as busy as the share of moments at which it runs a step, which is what a CPU, or a
GPU's duty cycle, would show of it.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from shoal.placement.autoscale import AutoscalePolicy
from shoal.simulator.cluster.decode_node import DecodeNode
from shoal.simulator.cluster.prefill_node import PrefillNode

_TOLERANCE: Final = 0.1


def sampled(nodes: Iterable[DecodeNode | PrefillNode]) -> float | None:
    """The share of ready workers that step now; None where none is ready."""
    ready = [node for node in nodes if node.life.is_ready]
    return sum(node.is_stepping for node in ready) / len(ready) if ready else None


@dataclass(slots=True)
class Threshold:
    """Of one pool. `saw` each sample, then `size` at each look."""

    target: float
    _samples: list[float] = field(default_factory=list)
    _desired: deque[tuple[float, int]] = field(default_factory=deque)

    def saw(self, busy: float | None) -> None:
        """A sample of the pool's utilisation."""
        if busy is not None:
            self._samples.append(busy)

    def size(self, num_workers: int, policy: AutoscalePolicy, now: float) -> int:
        """How many from now on, within the policy's bounds; its down cool-down is the stabilisation window."""
        samples, self._samples = self._samples, []
        ratio = sum(samples) / len(samples) / self.target if samples else 1.0
        wanted = num_workers if abs(ratio - 1) <= _TOLERANCE else math.ceil(num_workers * ratio - 1e-9)
        self._desired.append((now, wanted))
        while self._desired[0][0] < now - policy.down_cooldown_s:
            self._desired.popleft()
        if wanted < num_workers:
            wanted = min(num_workers, max(desired for _, desired in self._desired))
        return min(policy.max_workers, max(policy.min_workers, wanted))
