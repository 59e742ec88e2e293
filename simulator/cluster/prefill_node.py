"""A simulated prefill worker: the live Batcher and reservations, steps that last as long as formula 1 says, layers sent early."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from shoal.placement.batching import Batcher, Chunk, TokenCursor
from shoal.placement.reservation import prefill_reservation
from shoal.placement.tables import KvLayout
from shoal.simulator.cluster.events import Event
from shoal.simulator.cluster.holders import Holders
from shoal.simulator.cluster.job import Job
from shoal.simulator.cluster.network import Network, Port
from shoal.simulator.cluster.prefix_cache import PrefixCache
from shoal.simulator.cluster.shipment import ChunkBytes, Shipments
from shoal.simulator.step_cost import StepCost
from shoal.types import DType


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
    cache: PrefixCache | None = None
    busy_s: float = 0.0
    num_steps: int = 0
    _batcher: Batcher = field(default_factory=Batcher)
    _jobs: dict[str, Job] = field(default_factory=dict)
    _is_stepping: bool = False
    _shipments: Shipments = field(init=False)

    def __post_init__(self) -> None:
        self._shipments = Shipments(self.cost)

    def submit(self, job: Job, now: float) -> list[Event]:
        """Take a job: it computes once it has blocks. Raises CapacityExceeded or InvalidRequest as the live worker does."""
        shape, visibility = self.cost.model.shape, self.cost.visibility
        layout = KvLayout.of(shape.num_layers, visibility, job.num_prompt_tokens)
        size = prefill_reservation(shape, DType.BFLOAT16, self.holders.block_size, visibility, job.num_prompt_tokens)
        return self._begin([job], now) if self.holders.reserve(job, layout, size, now) else []

    def release(self, job: Job, now: float) -> list[Event]:
        """The transfer is acknowledged: blocks go back, others may begin."""
        return self._begin(self.holders.release(job, now), now)

    def _begin(self, jobs: Iterable[Job], now: float) -> list[Event]:
        for job in jobs:
            if self.cache is not None and job.prefix_hashes:
                hits = self.cache.num_hits(job.prefix_hashes)
                job.num_cached_tokens = min(hits * job.hash_tokens, job.num_prefill_tokens - 1)
            self._jobs[job.key] = job
            tokens = job.num_prefill_tokens
            self._batcher.add(TokenCursor(job.key, tokens, num_known=tokens, num_computed=job.num_cached_tokens))
        return [] if self._is_stepping else self._step(now)

    def _step(self, now: float) -> list[Event]:
        chunks = self._batcher.next_step(self.token_budget, self.holders.max_running)
        self._is_stepping = bool(chunks)
        if not chunks:
            return []
        for chunk in chunks:
            job = self._jobs[chunk.key]
            if job.prefill_start_s is None:
                job.prefill_start_s = now
        cost = self.cost.prefill_step([(chunk.start, chunk.stop) for chunk in chunks])
        self.busy_s += cost.total_s
        self.num_steps += 1
        shipped = [self._shipped(chunk) for chunk in chunks]
        first_layer = now + cost.overhead_s + cost.layers_s / self.cost.depth
        return [
            (first_layer, partial(self._first_layer, chunks, shipped)),
            (now + cost.total_s, partial(self._end, chunks, shipped)),
        ]

    def _shipped(self, chunk: Chunk) -> ChunkBytes:
        """A cached prefix is shipped with the first chunk: it saves compute only."""
        job = self._jobs[chunk.key]
        start = 0 if chunk.start == job.num_cached_tokens else chunk.start
        return self._shipments.chunk(job.split, start, chunk.stop)

    def _first_layer(self, chunks: tuple[Chunk, ...], shipped: list[ChunkBytes], now: float) -> list[Event]:
        events = []
        for chunk, part in zip(chunks, shipped, strict=True):
            if part.early_bytes:
                events += self._send(self._jobs[chunk.key], part.early_bytes, part.num_messages - 1, now)
        return events

    def _end(self, chunks: tuple[Chunk, ...], shipped: list[ChunkBytes], now: float) -> list[Event]:
        events: list[Event] = []
        for chunk, part in zip(chunks, shipped, strict=True):
            self._batcher.complete(chunk)
            job = self._jobs[chunk.key]
            events += self._send(job, part.last_bytes, 1, now)
            if chunk.stop == job.num_prefill_tokens:
                job.prefill_end_s = now
                if self.cache is not None:
                    self.cache.insert(job.prefix_hashes[: job.num_prefill_tokens // job.hash_tokens])
                self._batcher.remove(chunk.key)
                del self._jobs[chunk.key]
                assert job.flow is not None
                events += self.network.close(job.flow, now)
        return events + self._step(now)

    def _send(self, job: Job, num_bytes: float, num_messages: int, now: float) -> list[Event]:
        """Payload, and each message's latency as the bytes that would have passed in that time (formula 4 adds both)."""
        assert job.flow is not None
        job.wire_bytes += num_bytes
        latency_bytes = max(0, num_messages) * self.latency_s * job.flow.alone_bytes_per_s
        return self.network.send(job.flow, num_bytes + latency_bytes, now)
