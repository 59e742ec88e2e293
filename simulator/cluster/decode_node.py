"""A simulated decode or colocated worker: the live Batcher and reservations, steps that last as long as formula 2 says.

While the batch stays as it is, many steps are one event: `Burst`. Whoever joins cuts a burst at the end of the step then running,
as the live loop would let it in. Nothing else is approximated by this.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from shoal.placement.batching import Batcher, Chunk, TokenCursor
from shoal.placement.cost import kv_layer_tokens_read, request_cost
from shoal.placement.preemption import Holder, choose_victim, num_first_tokens
from shoal.placement.reservation import check_fits_ever, decode_reservation
from shoal.placement.tables import KvLayout
from shoal.simulator.cluster.burst import Burst
from shoal.simulator.cluster.events import Event
from shoal.simulator.cluster.histogram import LogHistogram
from shoal.simulator.cluster.holders import Holders, Wanted
from shoal.simulator.cluster.job import Job
from shoal.simulator.cluster.life import Life
from shoal.simulator.cluster.prefill_node import PrefillNode
from shoal.simulator.cluster.prefix_cache import publish, query
from shoal.simulator.step_cost import StepCost, StepWork
from shoal.types import USUAL_TURN, DType
from shoal.visibility import VisibilityKind

_LONGEST_BURST: Final = 4096  # steps


class Door(Protocol):
    """Who is told what becomes of a job."""

    def reserved_later(self, job: Job, now: float) -> Event: ...

    def preempted(self, job: Job, now: float) -> list[Event]: ...

    def finished(self, job: Job, now: float) -> list[Event]: ...


@dataclass(slots=True, eq=False)
class Row:
    """One running request."""

    job: Job
    num_generated: int = 0  # replayed ones included
    has_begun: bool = False  # its prompt's decode tokens have been run here
    num_decode_run: int = 0  # decode tokens run: boundary and generated
    num_read: int = 0  # (token, layer) pairs its latest token reads
    last_token_s: float = 0.0


@dataclass(slots=True, eq=False)
class DecodeNode:
    """Rows of one token, the chunks that begin them, and prompts too where `is_colocated`."""

    name: str
    cost: StepCost
    holders: Holders
    token_budget: int
    gaps: LogHistogram
    door: Door
    is_colocated: bool = False
    preempts: bool = False
    life: Life = field(default_factory=Life)
    neighbours: dict[str, PrefillNode] = field(default_factory=dict)  # who shares the host
    busy_s: float = 0.0
    row_seconds: float = 0.0
    prompt_s: float = 0.0  # of steps that carried prompt tokens (colocated)
    num_tokens: int = 0
    _batcher: Batcher = field(default_factory=Batcher)
    _rows: dict[str, Row] = field(default_factory=dict)
    _projections: deque[tuple[Job, int]] = field(default_factory=deque)
    _burst: Burst | None = None
    _is_stepping: bool = False
    _plan: int = 0  # events of older plans are void
    _base_s: dict[int, float] = field(default_factory=dict)

    def reserve(self, job: Job, now: float) -> bool:
        """As the live worker reserves: True when the blocks are taken. Raises CapacityExceeded or InvalidRequest."""
        shape, visibility = self.cost.model.shape, self.cost.visibility
        layout = KvLayout.of(shape.num_layers, visibility, job.num_prompt_tokens)
        size = decode_reservation(
            shape,
            DType.BFLOAT16,
            self.holders.block_size,
            visibility,
            job.num_prompt_tokens,
            job.max_tokens - job.num_replayed,
            num_replay_tokens=job.num_replayed,
        )
        if self.preempts:
            check_fits_ever(size, self.holders.blocks.num_blocks)
            num_first = num_first_tokens(job.max_tokens, job.num_replayed, self.holders.block_size)
            size = decode_reservation(
                shape,
                DType.BFLOAT16,
                self.holders.block_size,
                visibility,
                job.num_prompt_tokens,
                num_first - job.num_replayed,
                num_replay_tokens=job.num_replayed,
            )
        found = (
            query(job, shape, visibility, self.holders.block_size, of_prefill=False) if self.holders.cache is not None else None
        )
        return self.holders.reserve(job, Wanted(layout, size, found, resumes=job.num_preempted > 0), now)

    def begin(self, job: Job, now: float) -> list[Event]:
        """All KV the request needs is here (or, colocated, its prompt is due)."""
        self._rows[job.key] = Row(job, job.num_replayed)
        num_projected = job.num_prefill_tokens - job.num_decode_cached if self.cost.visibility.late and not job.is_local else 0
        if num_projected:
            self._projections.append((job, num_projected))
        else:
            self._add(job)
        if not self._is_stepping:
            return self._step(now)
        return self.replan(now)

    def num_generated(self, job: Job, now: float) -> int:
        """Tokens of a job sampled by `now`, those of a running burst included."""
        row = self._rows.get(job.key)
        if row is None:
            return job.num_replayed
        running = self._burst.steps_begun(now) - 1 if self._burst is not None else 0
        return row.num_generated + running

    def cancel(self, job: Job, now: float) -> list[Event]:
        """The job goes on elsewhere: its prefill leg has failed, or it was preempted. No step runs that it takes part in."""
        self._rows.pop(job.key, None)
        self._batcher.remove(job.key)
        self._projections = deque(due for due in self._projections if due[0] is not job)
        return self._admitted(self.holders.cancel(job, now), now)

    def fail(self, now: float) -> None:
        """The worker dies with all it holds. The front door knows whose requests were here."""
        for key in list(self._rows):
            self._batcher.remove(key)
        self._rows.clear()
        self._projections.clear()
        self.holders.clear(now)
        self._burst, self._is_stepping = None, False
        self._plan += 1

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def mean_pairs_read(self) -> float:
        """(token, layer) pairs that a row reads in a step; 0 without rows."""
        return sum(row.num_read for row in self._rows.values()) / len(self._rows) if self._rows else 0.0

    def _add(self, job: Job) -> None:
        num_done = job.num_decode_cached if job.is_local else job.num_prefill_tokens
        self._batcher.add(TokenCursor(job.key, 0, num_known=job.num_known_tokens, num_computed=num_done))

    def _grow(self, now: float) -> list[Event]:
        """As the live worker: room for what every row knows, the most senior first; the least senior gives way."""
        self.holders.is_closed = self._is_stepping = True
        events: list[Event] = []
        for row in sorted(self._rows.values(), key=lambda row: _holder(row.job).seniority):
            num_tokens = row.job.num_prompt_tokens + row.num_generated
            while row.job.key in self._rows and not self.holders.grow(row.job, num_tokens, now):
                held = {job.key: job for job in self.holders.jobs}
                victim = choose_victim(_holder(job) for job in held.values())
                events += self.door.preempted(held[victim.key], now)
        return events + self._admitted(self.holders.open(now), now)

    def _step(self, now: float) -> list[Event]:
        grown = self._grow(now) if self.preempts else []
        num_projected = self._take_projections()
        chunks = self._batcher.next_step(self.token_budget, self.holders.max_running)
        self._is_stepping = bool(chunks) or num_projected > 0
        if not self._is_stepping:
            return grown
        self._plan += 1
        if num_projected or len(chunks) < len(self._batcher) or not all(self._runs(chunk) for chunk in chunks):
            seconds = self.cost.step_s(self._work(chunks, num_projected)) * self._crowding
            return [*grown, (now + seconds, partial(self._end_step, chunks, now, self._plan))]
        self._burst = self._plan_burst(chunks, now)
        return [*grown, (now + self._burst.seconds(self._burst.num_steps), partial(self._end_burst, self._plan))]

    def _runs(self, chunk: Chunk) -> bool:
        """Whether the chunk is the next single token of a request that has begun."""
        return chunk.stop - chunk.start == 1 and self._rows[chunk.key].has_begun

    def _take_projections(self) -> int:
        left = self.token_budget
        while self._projections and left > 0:
            job, due = self._projections.popleft()
            run = min(due, left)
            left -= run
            if run < due:
                self._projections.appendleft((job, due - run))
            else:
                self._add(job)
        return self.token_budget - left

    def _work(self, chunks: Iterable[Chunk], num_projected: int) -> StepWork:
        rows = tokens = read = pairs = deep = prefill = 0
        for chunk in chunks:
            row = self._rows[chunk.key]
            split = row.job.split
            if chunk.start < split.num_prefill_tokens:  # run here, not on a prefill worker
                stop = min(chunk.stop, split.num_prefill_tokens)
                prefill += stop - chunk.start
                pairs += self.cost.lower_pairs(chunk.start, stop)
            start = max(chunk.start, split.num_prefill_tokens)
            size = chunk.stop - start
            if size <= 0:
                continue
            samples = chunk.stop >= row.job.num_known_tokens
            rows += samples
            tokens += size - samples
            read += self._read(row, row.num_decode_run + size)
            if not row.has_begun and start == split.num_prefill_tokens:
                deep += max(0, split.num_anchor_tokens - row.job.num_decode_cached) if self.cost.num_upper else 0
                pairs += self._boundary_pairs(row.job) if size > 1 else 0
        num_projected += prefill if self.cost.visibility.late else 0
        return StepWork(rows, read, tokens, pairs, deep, num_projected, prefill)

    def _boundary_pairs(self, job: Job) -> int:
        shape = self.cost.model.shape
        decode = request_cost(shape, self.cost.visibility, job.num_prompt_tokens, 1 + job.num_replayed).decode
        return decode.attention_flops // (4 * shape.num_heads * shape.head_dim)

    def _read(self, row: Row, num_decode_run: int) -> int:
        """Pairs the row's latest token reads. Without windows every further token reads L more (placement's count)."""
        shape = self.cost.model.shape
        if row.num_read and not shape.windows:
            return row.num_read + (num_decode_run - row.num_decode_run) * shape.num_layers
        return kv_layer_tokens_read(shape, self.cost.visibility, row.job.num_prompt_tokens, num_decode_run)

    def _plan_burst(self, chunks: tuple[Chunk, ...], now: float) -> Burst:
        rows = [self._rows[chunk.key] for chunk in chunks]
        num_steps = min(min(row.job.num_output_tokens - row.num_generated for row in rows), _LONGEST_BURST)
        if self.preempts:
            known = [(row.job, row.job.num_prompt_tokens + row.num_generated) for row in rows]
            num_steps = min(num_steps, 1 + min(self.holders.num_steps_left(*each) for each in known))
        base_s = self._base_s.get(len(rows))
        if base_s is None:
            base_s = self._base_s[len(rows)] = self.cost.step_s(StepWork(num_rows=len(rows)))
        first = sum(self._read(row, row.num_decode_run + 1) for row in rows)
        if self.cost.model.shape.windows and num_steps > 1:
            last = sum(self._read(row, row.num_decode_run + num_steps) for row in rows)
            growth = (last - first) / (num_steps - 1)
        else:
            growth = len(rows) * self.cost.model.shape.num_layers
        pair_s, crowding = self.cost.kv_pair_s, self._crowding
        return Burst(now, (base_s + first * pair_s) * crowding, growth * pair_s * crowding, num_steps, chunks)

    @property
    def _crowding(self) -> float:
        """How much longer a step is than alone on the host."""
        return 1 / (1 - min(0.9, sum(node.presses for node in self.neighbours.values())))

    @property
    def is_stepping(self) -> bool:
        return self._is_stepping

    def replan(self, now: float) -> list[Event]:
        """Somebody joins, or steps take another time from now on: plan anew at the end of the step now running."""
        burst = self._burst
        if burst is None:
            return []
        begun = burst.steps_begun(now)
        if begun >= burst.num_steps:
            return []
        burst.num_steps = begun
        self._plan += 1
        return [(max(now, burst.start_s + burst.seconds(begun)), partial(self._end_burst, self._plan))]

    def _end_burst(self, plan: int, now: float) -> list[Event]:
        if plan != self._plan or self._burst is None:
            return []
        burst, self._burst = self._burst, None
        steps, seconds = burst.num_steps, now - burst.start_s
        events: list[Event] = []
        self.gaps.add(seconds / steps, steps * len(burst.chunks))
        for chunk in burst.chunks:
            row = self._rows[chunk.key]
            self._batcher.complete(chunk)
            cursor = self._batcher[chunk.key]
            cursor.num_known += steps - 1  # the further steps of the burst, each one token
            cursor.num_computed += steps - 1
            self._advance(row, steps, steps)
            events += self._sampled(row, now)
        self._account(len(burst.chunks), seconds, steps * len(burst.chunks))
        return events + self._step(now)

    def _end_step(self, chunks: tuple[Chunk, ...], start_s: float, plan: int, now: float) -> list[Event]:
        events: list[Event] = []
        if plan != self._plan:
            return events
        num_sampled = 0
        if any(chunk.start < self._rows[chunk.key].job.num_prefill_tokens for chunk in chunks):
            self.prompt_s += now - start_s
        for chunk in chunks:
            self._batcher.complete(chunk)
            row = self._rows[chunk.key]
            split = row.job.split
            if chunk.start < split.num_prefill_tokens:
                if row.job.prefill_start_s is None:
                    row.job.prefill_start_s = start_s
                if chunk.stop < split.num_prefill_tokens:
                    continue
                row.job.prefill_end_s = now
                if chunk.stop == split.num_prefill_tokens:
                    continue
            samples = chunk.stop >= row.job.num_known_tokens
            if row.has_begun:
                self.gaps.add(now - row.last_token_s, 1)
            self._advance(row, chunk.stop - max(chunk.start, split.num_prefill_tokens), int(samples))
            if samples:
                num_sampled += 1
                if not row.has_begun:
                    row.has_begun = True
                    self._publish(row.job)
                    if row.job.first_token_s is None:
                        row.job.first_token_s = now
                    events += self._states_done(row.job, now)
                events += self._sampled(row, now)
        self._account(len(chunks), now - start_s, num_sampled)
        return events + self._step(now)

    def _publish(self, job: Job) -> None:
        cache, shape = self.holders.cache, self.cost.model.shape
        if cache is not None and job.prefix_hashes:
            tables, num_held = self.holders.tables(job), job.num_prompt_tokens
            publish(cache, tables, job, shape, num_held, job.num_decode_cached, of_prefill=False)

    def _advance(self, row: Row, num_run: int, num_generated: int) -> None:
        row.num_read = self._read(row, row.num_decode_run + num_run)
        row.num_decode_run += num_run
        row.num_generated += num_generated

    def _sampled(self, row: Row, now: float) -> list[Event]:
        """The row has a new token: it goes on or ends."""
        row.last_token_s = now
        key = row.job.key
        if row.num_generated < row.job.num_output_tokens:
            self._batcher.extend(key)
            return []
        row.job.finish_s = now
        self._batcher.remove(key)
        del self._rows[key]
        admitted = self.holders.release(row.job, now)
        return self.door.finished(row.job, now) + self._admitted(admitted, now)

    def _states_done(self, job: Job, now: float) -> list[Event]:
        if self.cost.visibility.kind is VisibilityKind.FULL or not self.cost.num_upper:
            return []
        return self._admitted(self.holders.release_states(job, now), now)

    def _admitted(self, jobs: Iterable[Job], now: float) -> list[Event]:
        return [self.door.reserved_later(job, now) for job in jobs]

    def _account(self, num_rows: int, seconds: float, num_tokens: int) -> None:
        self.busy_s += seconds
        self.row_seconds += num_rows * seconds
        self.num_tokens += num_tokens


def _holder(job: Job) -> Holder:
    return Holder(job.key, USUAL_TURN.priority.rank, job.arrival_s)
