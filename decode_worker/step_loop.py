"""Deep decode: the continuous batch of a decode worker. Knows requests, segments and sampling; knows no transport.

A step runs, for any mix of visibilities: late projections of what has arrived, anchors of requests that begin, and decode tokens
(boundary, replayed, generated). A layer's KV is written for all of them before any of them attends, so a request may begin in
the step that completes what it looks at.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from shoal.config.worker import WorkerConfig
from shoal.decode_worker import metrics
from shoal.decode_worker.output import Finish, OutputToken
from shoal.decode_worker.request import DecodeRequest, RequestState
from shoal.decode_worker.reservations import Reservation
from shoal.engine.resident import Resident
from shoal.engine.sampler import Sampled, SampleRow, sample
from shoal.engine.segment import LogitRows, Segment, anchor_segment, decode_segment, late_projection_segment
from shoal.engine.step_loop import StepLoop
from shoal.errors import InternalError
from shoal.placement.batching import Batcher, Chunk, TokenCursor
from shoal.types import FinishReason
from shoal.visibility import VisibilityKind


@dataclass(frozen=True, slots=True)
class Projection:
    """Prefill tokens whose shipped states become upper KV (late `pop`)."""

    request: DecodeRequest
    reservation: Reservation
    positions: range

    @property
    def key(self) -> str:
        return self.request.spec.attempt_id


@dataclass(frozen=True, slots=True)
class Row:
    """One request's decode tokens of a step, with its anchors when it begins."""

    request: DecodeRequest
    reservation: Reservation
    chunk: Chunk
    begins: bool
    samples: bool

    @property
    def anchors(self) -> range:
        """Anchors to run through the upper layers in this step."""
        layout = self.reservation.kv.layout
        is_speed = layout.visibility.kind is VisibilityKind.SPEED
        return range(layout.split.num_anchor_tokens if self.begins and is_speed and layout.upper_layers else 0)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What one step runs."""

    rows: tuple[Row, ...]
    projections: tuple[Projection, ...]


class DecodeStepLoop(StepLoop[DecodeStep, list[Sampled]]):
    """`project` and `add` bring work, `remove` takes a request out; a request that has all its tokens reports by `ended`."""

    def __init__(self, resident: Resident, config: WorkerConfig, *, release_states: Callable[[Reservation], None]) -> None:
        super().__init__("decode-step", config.num_threads)
        self._resident = resident
        self._config = config
        self._release_states = release_states
        self._batcher = Batcher()
        self._requests: dict[str, tuple[DecodeRequest, Reservation]] = {}
        self._beginning: dict[str, TokenCursor] = {}  # ready, and not in the batch while projections are due
        self._projections: deque[Projection] = deque()

    @property
    def num_running(self) -> int:
        return len(self._requests)

    def project(self, request: DecodeRequest, reservation: Reservation, positions: range) -> None:
        """States of these positions have arrived and are due for projection."""
        self._projections.append(Projection(request, reservation, positions))
        self.wake()

    def add(self, request: DecodeRequest, reservation: Reservation) -> None:
        """The request has all the KV it needs: P prefill tokens are done, the rest it runs here."""
        spec, key = request.spec, request.spec.attempt_id
        if request.ended.done():
            return
        self._requests[key] = (request, reservation)
        num_done = spec.layout.split.num_prefill_tokens
        self._beginning[key] = TokenCursor(key, 0, num_known=len(request.token_ids), num_computed=num_done)
        self.wake()

    async def remove(self, key: str) -> None:
        """Take a request out and return once no step touches its blocks. Harmless when it is not here."""
        self._forget(key)
        self.wake()  # others may have waited for its place
        await self.outside_step(key)

    def decide(self) -> DecodeStep | None:
        projections = self._take_projections(self._config.token_budget)
        due = {projection.key for projection in self._projections}
        for key in [key for key in self._beginning if key not in due]:
            self._batcher.add(self._beginning.pop(key))
        chunks = self._batcher.next_step(self._config.token_budget, self._config.max_running_requests)
        rows = tuple(self._row(chunk) for chunk in chunks)
        return DecodeStep(rows, projections) if rows or projections else None

    def keys(self, step: DecodeStep) -> Collection[str]:
        return {row.chunk.key for row in step.rows} | {projection.key for projection in step.projections}

    def execute(self, step: DecodeStep) -> list[Sampled]:
        segments: list[Segment] = []
        for projection in step.projections:
            states = _states(projection.reservation, projection.positions)
            segments.append(late_projection_segment(projection.reservation.kv, states, projection.positions))
        for row in step.rows:
            if row.anchors:
                segments.append(anchor_segment(row.reservation.kv, _states(row.reservation, row.anchors), row.anchors))
            positions = range(row.chunk.start, row.chunk.stop)
            ids = row.request.token_ids[positions.start : positions.stop]
            logits = LogitRows.LAST if row.samples else LogitRows.NONE
            segments.append(decode_segment(row.reservation.kv, ids, positions, logits))
        done = self._resident.decoder.forward(segments, self._resident.pool).run()
        rows = [SampleRow(row.request.spec.sampling, 0, row.chunk.stop) for row in step.rows if row.samples]
        return sample(done.logits, rows) if rows else []

    def account(self, step: DecodeStep, result: list[Sampled], seconds: float) -> None:
        metrics.STEP_SECONDS.observe(seconds)
        metrics.STEP_REQUESTS.observe(len(self.keys(step)))
        metrics.DECODE_TOKENS.inc(sum(row.chunk.num_tokens for row in step.rows))
        metrics.PROJECTED_TOKENS.inc(sum(len(projection.positions) for projection in step.projections))
        sampled = iter(result)
        for row in step.rows:
            self._batcher.complete(row.chunk)
            if row.begins and row.chunk.key in self._requests:
                self._release_states(row.reservation)  # anchors have run, projections were done before or with this step
            if row.samples:
                token = next(sampled)
                if row.chunk.key in self._requests:
                    self._take(row.request, token)
        if self._config.check_blocks:
            self._resident.blocks.check()

    def failed(self, step: DecodeStep) -> None:
        for request in [row.request for row in step.rows] + [projection.request for projection in step.projections]:
            self._forget(request.spec.attempt_id)
            request.end(InternalError("a step of the decode worker failed"))

    def _take_projections(self, num_tokens: int) -> tuple[Projection, ...]:
        """At most `num_tokens` tokens to project, in order of arrival."""
        taken: list[Projection] = []
        while self._projections and num_tokens > 0:
            first = self._projections.popleft()
            cut = min(first.positions.stop, first.positions.start + num_tokens)
            taken.append(Projection(first.request, first.reservation, range(first.positions.start, cut)))
            num_tokens -= cut - first.positions.start
            if cut < first.positions.stop:
                self._projections.appendleft(Projection(first.request, first.reservation, range(cut, first.positions.stop)))
        return tuple(taken)

    def _row(self, chunk: Chunk) -> Row:
        request, reservation = self._requests[chunk.key]
        begins = request.state is RequestState.READY
        if begins:
            request.move(RequestState.RUNNING)
        return Row(request, reservation, chunk, begins, samples=chunk.stop == len(request.token_ids))

    def _take(self, request: DecodeRequest, sampled: Sampled) -> None:
        """Account a sampled token: stream it, then go on or end."""
        sampling, token_id = request.spec.sampling, sampled.token_id
        request.sampled(token_id)
        request.output.put(OutputToken(token_id, sampled.logprobs))
        metrics.SAMPLED_TOKENS.inc()
        if token_id in sampling.stop_token_ids:
            self._finish(request, Finish(FinishReason.STOP, token_id))
        elif request.num_sampled >= sampling.max_tokens:
            self._finish(request, Finish(FinishReason.LENGTH))
        else:
            self._batcher.extend(request.spec.attempt_id)

    def _finish(self, request: DecodeRequest, finish: Finish) -> None:
        self._forget(request.spec.attempt_id)
        request.end(finish)

    def _forget(self, key: str) -> None:
        self._requests.pop(key, None)
        self._beginning.pop(key, None)
        self._batcher.remove(key)
        self._projections = deque(due for due in self._projections if due.key != key)


def _states(reservation: Reservation, positions: range) -> torch.Tensor:
    if reservation.states is None:
        raise InternalError(f"no deep states were kept for positions {positions}")
    return reservation.states.read(positions.start, positions.stop)
