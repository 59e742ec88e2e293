"""Refuses a simulated request early when it would wait too long for its start, by placement's rule. Knows what workers hold now.

The live router goes by reports that are a moment old; here they are of this moment.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.placement.admission import ComputeReport, RoomReport, WaitBounds
from shoal.placement.reservation import decode_reservation
from shoal.simulator.cluster.decode_node import DecodeNode
from shoal.simulator.cluster.job import Job
from shoal.simulator.cluster.prefill_node import PrefillNode
from shoal.types import DType, Priority


@dataclass(frozen=True, slots=True)
class Gate:
    """Asked before workers are chosen."""

    max_wait_s: float
    decode: Mapping[str, DecodeNode]
    prefill: Mapping[str, PrefillNode]
    owed: Callable[[str], int]  # token-layers that a prefill worker has yet to hand over

    def crowded(self, job: Job, now: float) -> set[str]:
        """Workers where the job would wait too long. Raises CapacityExceeded when those are all that could take it."""
        bounds = WaitBounds(self.max_wait_s, math.inf)
        rooms = {name: _room(node, now) for name, node in self.decode.items() if node.life.is_ready}
        waits = {name: room.wait_s(Priority.NORMAL, _need(self.decode[name], job)) for name, room in rooms.items()}
        crowded = _over(bounds, waits, lambda name: rooms[name].words(Priority.NORMAL))
        if job.num_prefill_tokens:
            queues = {name: self._queue(node) for name, node in self.prefill.items() if node.life.is_ready}
            waits = {name: queue.wait_s(Priority.NORMAL) for name, queue in queues.items()}
            crowded |= _over(bounds, waits, lambda name: queues[name].words(Priority.NORMAL))
        return crowded

    def _queue(self, node: PrefillNode) -> ComputeReport:
        return ComputeReport(node.name, ((Priority.NORMAL, self.owed(node.name)),), node.rate.per_s)


def _over(bounds: WaitBounds, waits: Mapping[str, float], words: Callable[[str], str]) -> set[str]:
    over = {name for name, wait_s in waits.items() if wait_s > bounds.bound_s}
    if waits and len(over) == len(waits):
        best = min(waits, key=lambda name: waits[name])
        raise bounds.refusal(waits[best], words(best))
    return over


def _need(node: DecodeNode, job: Job) -> int:
    """Blocks of the whole job, as the worker will reserve them."""
    shape, visibility = node.cost.model.shape, node.cost.visibility
    size = node.holders.block_size
    return decode_reservation(shape, DType.BFLOAT16, size, visibility, job.num_prompt_tokens, job.max_tokens).num_blocks


def _room(node: DecodeNode, now: float) -> RoomReport:
    holders = node.holders
    num_waiting, num_blocks = holders.waiting
    return RoomReport(
        worker_id=node.name,
        num_used_blocks=holders.blocks.num_used,
        num_total_blocks=holders.blocks.num_blocks,
        num_holders=holders.num_holders,
        max_holders=holders.max_running,
        waiting=((Priority.NORMAL, num_waiting, num_blocks),),
        mean_hold_s=holders.mean_hold_s(now),
    )
