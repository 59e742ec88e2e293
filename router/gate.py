"""Refuses a request early when it would wait too long for its start. Knows workers' reports and requests; decides by placement.

Each router goes by the workers' own reports, which hold all routers' requests, and by what it has itself sent since the last
one. So with several routers at most what the others sent within one report's interval is unknown.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

from shoal.config.disaggregation import NEVER_LOCAL, DisaggregationRule
from shoal.placement.admission import ComputeReport, RoomReport, WaitBounds
from shoal.placement.cost import request_token_layers
from shoal.placement.disaggregate import PrefillSite, choose_prefill_site
from shoal.placement.reservation import decode_reservation
from shoal.router.instruments import PREDICTED_WAIT, REFUSED
from shoal.router.legs import DispatchRequest
from shoal.router.registry import Registry
from shoal.router.worker import DECODE, PREFILL, Worker
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility

Key = tuple[str, int]


class Gate:
    """One per router. `max_wait_s` 0: no bound but the request's own deadline."""

    def __init__(
        self,
        registry: Registry,
        shape: ModelShape,
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        disaggregation: DisaggregationRule = NEVER_LOCAL,
    ) -> None:
        self._disaggregation = disaggregation
        self._registry = registry
        self._shape = shape
        self._max_wait_s = max_wait_s or math.inf
        self._clock = clock
        self._num_blocks = lru_cache(maxsize=1024)(self._count_blocks)  # asked before a request is sent, and when it is

    def crowded(self, request: DispatchRequest) -> set[Key]:
        """Workers where the request would wait too long. Raises CapacityExceeded when those are all that could take it."""
        bounds = WaitBounds(self._max_wait_s, request.deadline - self._clock())
        rooms = {worker: self._room(worker) for worker in self._candidates(DECODE, request)}
        waits = {worker: room.wait_s(request.turn.priority, self._need(request, worker)) for worker, room in rooms.items()}
        crowded = self._over(bounds, waits, lambda worker: rooms[worker].words(request.turn.priority))
        longest = min(waits.values(), default=0.0)
        if self.needs_prefill(request):
            queues = {worker: _queue(worker) for worker in self._candidates(PREFILL, request)}
            waits = {worker: queue.wait_s(request.turn.priority) for worker, queue in queues.items()}
            crowded |= self._over(bounds, waits, lambda worker: queues[worker].words(request.turn.priority))
            longest = max(longest, min(waits.values(), default=0.0))
        PREDICTED_WAIT.observe(longest)
        return crowded

    def sent(self, request: DispatchRequest, decode: Worker, prefill: Worker | None) -> None:
        """The request goes to these workers, which will report it the next time."""
        decode.sent.add(request.turn.priority, self._need(request, decode))
        if prefill is not None:
            cost, _ = request_token_layers(self._shape, request.visibility, len(request.prompt_ids), 1)
            prefill.sent.add(request.turn.priority, cost)

    def has_spare(self, request: DispatchRequest) -> bool:
        """Whether some worker of each leg could take a request that is nobody's and still have half of itself for others."""
        decoders = self._candidates(DECODE, request)
        if not any(self._room(worker).has_spare(self._need(request, worker)) for worker in decoders):
            return False
        if not self.needs_prefill(request):
            return True
        alone = all(worker.is_colocated for worker in decoders)
        return alone or any(_queue(worker).has_spare() for worker in self._candidates(PREFILL, request))

    def is_pressed(self) -> bool:
        """Whether more than one request waits on some worker, by its last report: one may be nobody's own."""
        workers = self._registry.workers
        return any(sum(own.num_waiting_reqs for own in worker.load.classes) > 1 for worker in workers if worker.state == "ready")

    def _over(self, bounds: WaitBounds, waits: Mapping[Worker, float], words: Callable[[Worker], str]) -> set[Key]:
        over = {worker.key for worker, wait_s in waits.items() if wait_s > bounds.bound_s}
        if waits and len(over) == len(waits):
            best = min(waits, key=lambda worker: waits[worker])
            REFUSED.labels("deadline" if bounds.time_left_s < bounds.max_wait_s else "wait").inc()
            raise bounds.refusal(waits[best], words(best))
        return over

    def needs_prefill(self, request: DispatchRequest) -> bool:
        """Whether the rule sends its prompt to a prefill worker, as far as the router can tell."""
        choice = choose_prefill_site(self._disaggregation, request.num_prefill_tokens, has_images=bool(request.images))
        return choice.site is PrefillSite.PREFILL_WORKER

    def _candidates(self, pool: str, request: DispatchRequest) -> Collection[Worker]:
        views = [(worker, worker.view()) for worker in self._registry.pool(pool)]
        usable = [(worker, view) for worker, view in views if view.is_ready and not view.is_tripped]
        return [worker for worker, view in usable if view.allows(request.placed_visibility)]

    def _need(self, request: DispatchRequest, worker: Worker) -> int:
        """Blocks of the whole request, as the worker will reserve them."""
        held, num_tokens = worker.fingerprint, request.num_expected_tokens
        return self._num_blocks(
            held.dtype, held.block_size, request.visibility, len(request.prompt_ids), num_tokens, request.num_children
        )

    def _count_blocks(
        self, dtype: DType, block_size: int, visibility: Visibility, num_prompt: int, num_tokens: int, num_children: int
    ) -> int:
        further = [num_tokens] * (num_children - 1)
        size = decode_reservation(self._shape, dtype, block_size, visibility, num_prompt, num_tokens, further_answers=further)
        return size.num_blocks

    def _room(self, worker: Worker) -> RoomReport:
        load = worker.load
        return RoomReport(
            worker_id=worker.worker_id,
            num_used_blocks=load.num_used_blocks,
            num_total_blocks=load.num_total_blocks,
            num_holders=load.num_reservations,
            max_holders=load.max_reservations,
            waiting=(*worker.waiting, *((priority, *sums) for priority, sums in worker.sent.sums.items())),
            mean_hold_s=load.mean_hold_s,
        )


def _queue(worker: Worker) -> ComputeReport:
    sent = ((priority, token_layers) for priority, (_, token_layers) in worker.sent.sums.items())
    return ComputeReport(worker.worker_id, (*worker.outstanding, *sent), worker.load.token_layers_per_s)
