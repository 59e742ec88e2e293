"""One step of deep decode, from what was decided to what came of it. Knows segments, logits and sampling; decides nothing.

A step runs, for any mix of visibilities: late projections of what has arrived, anchors of requests that begin, and decode tokens
(boundary, replayed, generated, scored). A layer's KV is written for all of them before any of them attends, so a request may
begin in the step that completes what it looks at. So prefill tokens that run here may share a step with the first decode tokens.
"""

from dataclasses import dataclass

import torch

from shoal.decode_worker.child import Child
from shoal.decode_worker.request import DecodeRequest
from shoal.decode_worker.reservations import Reservation
from shoal.engine.resident import Resident
from shoal.engine.sampling import Picked, Want, pick
from shoal.engine.segment import (
    Segment,
    anchor_segment,
    late_projection_segment,
    local_prefill_segments,
    scored_segments,
)
from shoal.errors import InternalError
from shoal.placement.batching import Chunk
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
    """One child's tokens of a step: prefill tokens that run here, decode tokens, and the request's anchors when it begins.

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
    def num_token_layers(self) -> int:
        """Placement's measure of work."""
        layout = self.reservation.kv.layout
        return len(self.prefill) * len(layout.lower_layers) + len(self.decode) * layout.num_layers

    @property
    def anchors(self) -> range:
        """Anchors whose shipped states enter the upper layers in this step."""
        layout = self.reservation.kv.layout
        is_due = self.begins and layout.visibility.kind is VisibilityKind.SPEED and not self.reservation.prefill.is_local
        num_anchors = layout.split.num_anchor_tokens if is_due and layout.upper_layers else 0
        return range(min(self.reservation.num_cached_tokens, num_anchors), num_anchors)

    @property
    def prefill(self) -> range:
        """Prefill tokens that run in this step."""
        num_prefill = self.reservation.kv.layout.split.num_prefill_tokens
        return range(self.chunk.start, max(self.chunk.start, min(self.chunk.stop, num_prefill)))

    @property
    def decode(self) -> range:
        """Decode tokens that run in this step."""
        return range(self.prefill.stop, self.chunk.stop)

    @property
    def scored(self) -> range:
        """Positions whose logits score the token after them."""
        targets = self.request.spec.scored_tokens
        return range(max(self.decode.start, targets.start - 1), min(self.decode.stop, targets.stop - 1))

    @property
    def scored_ids(self) -> tuple[int, ...]:
        """The tokens after those at `scored`."""
        return self.request.token_ids(self.request.children[self.at], self.scored.start + 1, self.scored.stop + 1)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What runs next."""

    rows: tuple[Row, ...]
    projections: tuple[Projection, ...]


def run_step(step: DecodeStep, resident: Resident) -> list[Picked]:
    """Run it, and say what came of each row. In the step thread."""
    segments: list[Segment] = []
    for projection in step.projections:
        states = _states(projection.reservation, projection.positions)
        segments.append(late_projection_segment(projection.reservation.kv, states, projection.positions))
    for row in step.rows:
        segments += _segments(row)
    logits = resident.decoder.forward(segments, resident.pool).run().logits
    for row in step.rows:
        _fork(row, resident)
    return pick(logits, [_want(row) for row in step.rows])


def _segments(row: Row) -> list[Segment]:
    segments: list[Segment] = []
    if row.anchors:
        segments.append(anchor_segment(row.reservation.kv, _states(row.reservation, row.anchors), row.anchors))
    kv, child = row.reservation.answers[row.at], row.request.children[row.at]
    if row.prefill:
        segments += local_prefill_segments(kv, row.request.token_ids(child, row.prefill.start, row.prefill.stop), row.prefill)
    if row.decode:
        ids = row.request.token_ids(child, row.decode.start, row.decode.stop)
        segments += scored_segments(kv, ids, row.decode, row.scored, draws=bool(row.draws))
    return segments


def _fork(row: Row, resident: Resident) -> None:
    answers = row.reservation.holding.answers
    source = answers[0].partial_blocks() if row.forks else None
    for at in row.forks:
        resident.pool.copy_blocks(source, answers[at].partial_blocks())  # type: ignore[arg-type]  # forks: it is there


def _want(row: Row) -> Want:
    """A score always has the best token beside its own: it tells whether a greedy pick would have been the same."""
    spec = row.request.spec
    num_top = max(1, spec.num_continuation_logprobs) if spec.is_score else spec.prompt_logprobs or 0
    return Want([child.sample_row() for child in row.draws], row.scored_ids, num_top)


def _states(reservation: Reservation, positions: range) -> torch.Tensor:
    if reservation.states is None:
        raise InternalError(f"no deep states were kept for positions {positions}")
    return reservation.states.read(positions.start, positions.stop)
