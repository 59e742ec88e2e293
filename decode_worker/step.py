"""One step of deep decode, from what was decided to what came of it. Knows segments, logits and sampling; decides nothing.

A step runs, for any mix of visibilities: late projections of what has arrived, anchors of requests that begin, and decode tokens
(boundary, replayed, generated, scored). A layer's KV is written for all of them before any of them attends, so a request may
begin in the step that completes what it looks at.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.decode_worker.child import Child
from shoal.decode_worker.request import DecodeRequest
from shoal.decode_worker.reservations import Reservation
from shoal.engine.resident import Resident
from shoal.engine.sampling import Sampled, sample, score
from shoal.engine.segment import Segment, anchor_segment, late_projection_segment, scored_segments
from shoal.errors import InternalError
from shoal.placement.batching import Chunk
from shoal.types import TokenLogprobs
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
    """One child's decode tokens of a step, with the request's anchors when it begins.

    The row that completes the prompt of several children runs in the first one's tables: all that have nothing to replay draw
    from it, and the others (`forks`) take their copies of the prompt's last block after it.
    """

    request: DecodeRequest
    reservation: Reservation
    at: int  # of the child whose tables it runs in
    chunk: Chunk
    begins: bool
    draws: tuple[Child, ...]
    forks: tuple[int, ...] = ()  # places in request.children

    @property
    def anchors(self) -> range:
        """Anchors to run through the upper layers in this step."""
        layout = self.reservation.kv.layout
        is_speed = layout.visibility.kind is VisibilityKind.SPEED
        return range(layout.split.num_anchor_tokens if self.begins and is_speed and layout.upper_layers else 0)

    @property
    def scored(self) -> range:
        """Positions whose logits score the token after them."""
        targets = self.request.spec.scored_tokens
        return range(max(self.chunk.start, targets.start - 1), min(self.chunk.stop, targets.stop - 1))

    @property
    def scored_ids(self) -> tuple[int, ...]:
        """The tokens after those at `scored`."""
        return self.request.token_ids(self.request.children[self.at], self.scored.start + 1, self.scored.stop + 1)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What runs next."""

    rows: tuple[Row, ...]
    projections: tuple[Projection, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of it: for each row, the tokens its children drew, and scores of given tokens."""

    drawn: list[list[Sampled]]
    scores: list[list[TokenLogprobs]]


def run_step(step: DecodeStep, resident: Resident) -> StepResult:
    """Run it. In the step thread."""
    segments: list[Segment] = []
    for projection in step.projections:
        states = _states(projection.reservation, projection.positions)
        segments.append(late_projection_segment(projection.reservation.kv, states, projection.positions))
    for row in step.rows:
        segments += _segments(row)
    logits = resident.decoder.forward(segments, resident.pool).run().logits
    for row in step.rows:
        _fork(row, resident)
    return _pick(step.rows, logits)


def _segments(row: Row) -> list[Segment]:
    segments: list[Segment] = []
    if row.anchors:
        segments.append(anchor_segment(row.reservation.kv, _states(row.reservation, row.anchors), row.anchors))
    kv, positions = row.reservation.answers[row.at], range(row.chunk.start, row.chunk.stop)
    ids = row.request.token_ids(row.request.children[row.at], positions.start, positions.stop)
    return segments + scored_segments(kv, ids, positions, row.scored, draws=bool(row.draws))


def _fork(row: Row, resident: Resident) -> None:
    answers = row.reservation.holding.answers
    source = answers[0].partial_blocks() if row.forks else None
    for at in row.forks:
        resident.pool.copy_blocks(source, answers[at].partial_blocks())  # type: ignore[arg-type]  # forks: it is there


def _pick(rows: Sequence[Row], logits: torch.Tensor) -> StepResult:
    """Draw and score. Rows of logits are, for each row of the step: those of its scored tokens, then the one drawn from."""
    scored: list[int] = []
    drawn_from: list[int] = []
    first = 0
    for row in rows:
        scored += range(first, first + len(row.scored))
        first += len(row.scored)
        drawn_from += [first] * len(row.draws)
        first += bool(row.draws)
    targets = [token_id for row in rows for token_id in row.scored_ids]
    num_top = [_num_top(row) for row in rows for _ in row.scored]
    scores = iter(score(_rows(logits, scored), targets, num_top))
    drawn = iter(sample(_rows(logits, drawn_from), [child.sample_row() for row in rows for child in row.draws]))
    return StepResult([[next(drawn) for _ in row.draws] for row in rows], [[next(scores) for _ in row.scored] for row in rows])


def _rows(logits: torch.Tensor, index: list[int]) -> torch.Tensor:
    if index == list(range(len(logits))):
        return logits
    return logits[torch.tensor(index, dtype=torch.int64, device=logits.device)]


def _num_top(row: Row) -> int:
    """A score always has the best token beside its own: it tells whether a greedy pick would have been the same."""
    spec = row.request.spec
    return max(1, spec.num_continuation_logprobs) if spec.is_score else spec.prompt_logprobs or 0


def _states(reservation: Reservation, positions: range) -> torch.Tensor:
    if reservation.states is None:
        raise InternalError(f"no deep states were kept for positions {positions}")
    return reservation.states.read(positions.start, positions.stop)
