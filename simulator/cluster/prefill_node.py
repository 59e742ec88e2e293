"""A simulated prefill worker: the live Batcher and reservations, steps that last as long as formula 1 says, layers sent early."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from shoal.placement.batching import Batcher, Chunk, TokenCursor
from shoal.placement.rates import WorkRate
from shoal.placement.reservation import prefill_reservation
from shoal.placement.tables import KvLayout
from shoal.simulator.cluster.events import Event
from shoal.simulator.cluster.holders import Holders, Wanted
from shoal.simulator.cluster.job import Job
from shoal.simulator.cluster.life import Life
from shoal.simulator.cluster.network import Network, Port
from shoal.simulator.cluster.prefix_cache import publish, query
from shoal.simulator.cluster.shipment import ChunkBytes, Shipments
from shoal.simulator.step_cost import StepCost
from shoal.types import DType

if TYPE_CHECKING:
    from shoal.simulator.cluster.decode_node import DecodeNode


_MOST = 0.9  # of a neighbour's time


@dataclass(slots=True, eq=False)
class PrefillNode:
    """Chunks of prompts in, bytes out. `submit` and `release` are called by the front door."""

    name: str
    cost: StepCost
    holders: Holders
    network: Network
    port: Port
    token_budget: int
    latency_s: float  # of one message
    handoff_s: float  # constant per request
    life: Life = field(default_factory=Life)
    neighbours: "dict[str, DecodeNode]" = field(default_factory=dict)  # who shares the host
    presses: float = 0.0  # share of the neighbours' time that the step now running takes from them
    rate: WorkRate = field(default_factory=WorkRate)  # token-layers per second, as the live worker reports it
    busy_s: float = 0.0
    num_steps: int = 0
    _batcher: Batcher = field(default_factory=Batcher)
    _jobs: dict[str, Job] = field(default_factory=dict)
    _is_stepping: bool = False
    _epoch: int = 0  # events of a worker that died are void
    _shipments: Shipments = field(init=False)

    def __post_init__(self) -> None:
        self._shipments = Shipments(self.cost)

    def submit(self, job: Job, now: float) -> list[Event]:
        """Take a job: it computes once it has blocks. Raises CapacityExceeded or InvalidRequest as the live worker does."""
        shape, visibility = self.cost.model.shape, self.cost.visibility
        layout = KvLayout.of(shape.num_layers, visibility, job.num_prompt_tokens)
        size = prefill_reservation(shape, DType.BFLOAT16, self.holders.block_size, visibility, job.num_prompt_tokens)
        found = (
            query(job, shape, visibility, self.holders.block_size, of_prefill=True) if self.holders.cache is not None else None
        )
        return self._begin([job], now) if self.holders.reserve(job, Wanted(layout, size, found), now) else []

    def release(self, job: Job, now: float) -> list[Event]:
        """The transfer is acknowledged: blocks go back, others may begin."""
        return self._begin(self.holders.release(job, now), now)

    def cancel(self, job: Job, now: float) -> list[Event]:
        """The job's other leg has failed."""
        events = [] if job.flow is None else self.network.cancel(job.flow, now)
        self._forget(job.key)
        return events + self._begin(self.holders.cancel(job, now), now)

    def fail(self, now: float) -> None:
        """The worker dies with all it holds. The front door knows whose requests were here."""
        self._epoch += 1
        for key in list(self._jobs):
            self._forget(key)
        self.holders.clear(now)
        self._is_stepping, self.presses = False, 0.0

    @property
    def is_stepping(self) -> bool:
        return self._is_stepping

    def _tell(self, now: float) -> list[Event]:
        """Decode steps on the same host are longer from now on, or shorter."""
        return [event for node in self.neighbours.values() for event in node.replan(now)]

    def _forget(self, key: str) -> None:
        self._jobs.pop(key, None)
        self._batcher.remove(key)

    def _begin(self, jobs: Iterable[Job], now: float) -> list[Event]:
        for job in jobs:
            job.num_cached_tokens = self.holders.num_cached_tokens(job)
            self._jobs[job.key] = job
            tokens = job.num_prefill_tokens
            self._batcher.add(TokenCursor(job.key, tokens, num_known=tokens, num_computed=job.num_cached_tokens))
        return [] if self._is_stepping else self._step(now)

    def _step(self, now: float) -> list[Event]:
        chunks = self._batcher.next_step(self.token_budget, self.holders.max_running)
        was_stepping, self._is_stepping = self._is_stepping, bool(chunks)
        if not chunks:
            self.presses = 0.0
            return self._tell(now) if was_stepping else []
        told: list[Event] = []
        for chunk in chunks:
            job = self._jobs[chunk.key]
            if job.prefill_start_s is None:
                job.prefill_start_s = now
        cost = self.cost.prefill_step([(chunk.start, chunk.stop) for chunk in chunks])
        profile = self.cost.machine.profile
        if any(node.is_stepping for node in self.neighbours.values()):
            cost = cost.longer(1 + profile.crowd_prefill)
        if self.neighbours:
            joining = sum(chunk.num_tokens / self._jobs[chunk.key].num_prefill_tokens for chunk in chunks)
            self.presses = min(_MOST, profile.crowd_decode + profile.join_s * joining / cost.total_s)
            told = self._tell(now)
        self.busy_s += cost.total_s
        self.rate.ran(sum(chunk.num_tokens for chunk in chunks) * self.cost.depth, cost.total_s)
        self.num_steps += 1
        shipped = [self._shipped(chunk) for chunk in chunks]
        first_layer = now + cost.overhead_s + cost.layers_s / self.cost.depth
        return [
            *told,
            (first_layer, partial(self._first_layer, chunks, shipped, self._epoch)),
            (now + cost.total_s, partial(self._end, chunks, shipped, self._epoch)),
        ]

    def _shipped(self, chunk: Chunk) -> ChunkBytes:
        """A prefix cached here is shipped with the first chunk: it saves compute only. What decode holds is not shipped."""
        job = self._jobs[chunk.key]
        start = 0 if chunk.start == job.num_cached_tokens else chunk.start
        return self._shipments.chunk(job.split, max(start, job.num_decode_cached), chunk.stop, job.num_decode_cached)

    def _first_layer(self, chunks: tuple[Chunk, ...], shipped: list[ChunkBytes], epoch: int, now: float) -> list[Event]:
        events: list[Event] = []
        if epoch != self._epoch:
            return events
        for chunk, part in zip(chunks, shipped, strict=True):
            if part.early_bytes and chunk.key in self._jobs:
                events += self._send(self._jobs[chunk.key], part.early_bytes, part.num_messages - 1, now)
        return events

    def _end(self, chunks: tuple[Chunk, ...], shipped: list[ChunkBytes], epoch: int, now: float) -> list[Event]:
        events: list[Event] = []
        if epoch != self._epoch:
            return events
        for chunk, part in zip(chunks, shipped, strict=True):
            self._batcher.complete(chunk)
            if (job := self._jobs.get(chunk.key)) is None:
                continue
            events += self._send(job, part.last_bytes, 1, now)
            if chunk.stop == job.num_prefill_tokens:
                job.prefill_end_s = now
                self._publish(job)
                self._forget(chunk.key)
                assert job.flow is not None
                events += self.network.close(job.flow, now)
        return events + self._step(now)

    def _publish(self, job: Job) -> None:
        cache, shape, num_tokens = self.holders.cache, self.cost.model.shape, job.num_prefill_tokens
        if cache is not None and job.prefix_hashes and not self.cost.visibility.late:
            publish(cache, self.holders.tables(job), job, shape, num_tokens, job.num_cached_tokens, of_prefill=True)

    def _send(self, job: Job, num_bytes: float, num_messages: int, now: float) -> list[Event]:
        """Payload, and each message's latency as the bytes that would have passed in that time (formula 4 adds both)."""
        assert job.flow is not None
        job.wire_bytes += num_bytes
        latency_bytes = max(0, num_messages) * self.latency_s * job.flow.alone_bytes_per_s
        return self.network.send(job.flow, num_bytes + latency_bytes, now)
