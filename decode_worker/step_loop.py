"""Deep decode: the continuous batch of a decode worker. Knows requests and their children; knows no transport and no tensors.

A request enters with one cursor, that of its first child. Where it has several, that cursor runs the prompt's decode tokens; then
the others join, each with its own tables, and from there on every child is a sequence like any other.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from shoal.config.worker import WorkerConfig
from shoal.decode_worker import metrics
from shoal.decode_worker.child import Child
from shoal.decode_worker.output import Finish, OutputToken, PromptLogprobs
from shoal.decode_worker.request import DecodeRequest, RequestState
from shoal.decode_worker.reservations import Reservation, Reservations
from shoal.decode_worker.step import DecodeStep, Projection, Row, run_step
from shoal.engine.resident import Resident
from shoal.engine.sampling import Picked, Sampled
from shoal.engine.step_loop import StepLoop
from shoal.errors import InternalError, InvalidRequest, Preempted
from shoal.placement.batching import Batcher, Chunk, TokenCursor
from shoal.placement.preemption import Holder, choose_victim
from shoal.types import FinishReason, TokenLogprobs

_AFTER_FIRST_TOKEN_S: Final = 0.002  # the token is on its way and the next step runs, when its prompt is kept for others
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Whose cursor a key is."""

    request: DecodeRequest
    reservation: Reservation
    at: int  # place in request.children

    @property
    def child(self) -> Child:
        return self.request.children[self.at]


def _holder(request: DecodeRequest) -> Holder:
    return Holder(request.spec.attempt_id, request.spec.turn.priority.rank, request.arrived_at)


class DecodeStepLoop(StepLoop[DecodeStep, list[Picked]]):
    """`project` and `add` bring work, `remove` takes a request out; a request that has all its tokens reports by `ended`."""

    def __init__(self, resident: Resident, config: WorkerConfig, reservations: Reservations) -> None:
        super().__init__("decode-step", config.num_threads)
        self._resident = resident
        self._config = config
        self._reservations = reservations
        self._batcher = Batcher()
        self._requests: dict[str, tuple[DecodeRequest, Reservation]] = {}
        self._sequences: dict[str, _Sequence] = {}  # by child
        self._beginning: dict[str, TokenCursor] = {}  # ready, and not in the batch while projections are due
        self._projections: deque[Projection] = deque()
        self.holders: Callable[[], list[DecodeRequest]] = list  # every request of the worker
        self._stalled: dict[str, TokenCursor] = {}  # sequences that must wait for blocks
        self._ended_in_step: list[_Sequence] = []  # children whose blocks a running step may still touch

    @property
    def num_running(self) -> int:
        return len(self._requests)

    def project(self, request: DecodeRequest, reservation: Reservation, positions: range) -> None:
        """States of these positions have arrived and are due for projection."""
        self._projections.append(Projection(request, reservation, positions))
        self.wake()

    def add(self, request: DecodeRequest, reservation: Reservation) -> None:
        """The request has all the KV it needs from elsewhere; the rest it runs here."""
        key, first = request.spec.attempt_id, request.children[0]
        if request.ended.done():
            return
        self._requests[key] = (request, reservation)
        self._sequences[first.key] = _Sequence(request, reservation, 0)
        num_done = request.spec.layout.split.num_prefill_tokens
        if reservation.prefill.is_local:
            num_done = request.num_prefilled = reservation.num_cached_tokens
        self.tally.prompts.add(request.spec.layout.split.num_prefill_tokens - num_done)
        num_known = request.num_known_tokens(first)
        rank, is_background = request.spec.turn.priority.rank, request.spec.is_background
        self._beginning[key] = TokenCursor(first.key, 0, num_known, num_done, rank, is_background)
        self.wake()

    def end_children(self, request: DecodeRequest, indexes: Collection[int]) -> None:
        """These children need no more tokens; with the last one the request ends."""
        for at, child in enumerate(request.children):
            if child.index in indexes and child.finish is None:
                self._finish(request, at, Finish(FinishReason.ABORT, index=child.index))

    async def remove(self, key: str) -> None:
        """Take a request out and return once no step touches its blocks. Harmless when it is not here."""
        self._forget(key)
        self.wake()  # others may have waited for its place
        await self.outside_step(key)

    def decide(self) -> DecodeStep | None:
        if self._config.preemption:
            self._grow()
        projections = self._take_projections(self._config.token_budget)
        due = {projection.key for projection in self._projections}
        for key in [key for key in self._beginning if key not in due]:
            self._batcher.add(self._beginning.pop(key))
        chunks = self._batcher.next_step(self._config.token_budget, self._config.max_running_requests)
        rows = tuple(self._row(chunk) for chunk in chunks)
        return DecodeStep(rows, projections) if rows or projections else None

    def keys(self, step: DecodeStep) -> Collection[str]:
        return {row.request.spec.attempt_id for row in step.rows} | {projection.key for projection in step.projections}

    def execute(self, step: DecodeStep) -> list[Picked]:
        return run_step(step, self._resident)

    def account(self, step: DecodeStep, result: list[Picked], seconds: float) -> None:
        metrics.STEP_SECONDS.observe(seconds)
        is_background = bool(step.rows) and all(row.request.spec.is_background for row in step.rows)
        if not is_background:  # small pieces say nothing of the pace
            self.rate.ran(sum(row.num_token_layers for row in step.rows), seconds)
        metrics.STEP_REQUESTS.observe(len(self.keys(step)))
        if step.rows:
            self.tally.stepped(len(step.rows), sum(row.chunk.num_tokens for row in step.rows), seconds)
        metrics.DECODE_TOKENS.inc(sum(len(row.decode) for row in step.rows))
        metrics.PREFILLED_TOKENS.inc(sum(len(row.prefill) for row in step.rows))
        metrics.PROJECTED_TOKENS.inc(sum(len(projection.positions) for projection in step.projections))
        for row, picked in zip(step.rows, result, strict=True):
            self._batcher.complete(row.chunk)
            if row.request.spec.attempt_id not in self._requests:
                continue
            row.request.num_prefilled += len(row.prefill)
            child = row.request.children[row.at]
            child.num_run = row.chunk.stop
            if row.begins:
                self._reservations.release_states(row.reservation)  # anchors have run, projections before or with this step
                asyncio.get_running_loop().call_later(_AFTER_FIRST_TOKEN_S, self._publish_begun, row.request, row.at)
            self._reservations.drop_hidden(row.reservation, row.at, child.num_run)
            self._take_scores(row, picked.scores)
            self._join(row)
            for child, sampled in zip(row.draws, picked.drawn, strict=True):
                self._take(row.request, child, sampled)
        self._release_ended()
        if self._config.check_blocks:
            self._resident.blocks.check()

    def failed(self, step: DecodeStep) -> None:
        for request in [row.request for row in step.rows] + [projection.request for projection in step.projections]:
            self._forget(request.spec.attempt_id)
            request.end(InternalError("a step of the decode worker failed"))
        self._release_ended()

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
        sequence = self._sequences[chunk.key]
        request = sequence.request
        begins = request.begins and chunk.stop > request.spec.layout.split.num_prefill_tokens
        if begins:
            request.move(RequestState.RUNNING)
        elif request.state is RequestState.READY:
            request.move(RequestState.PREFILLING)
        draws: tuple[Child, ...] = ()
        forks: tuple[int, ...] = ()
        if chunk.stop == request.num_known_tokens(sequence.child) and not request.spec.is_score:
            draws = (sequence.child,)
            if not request.has_forked:
                draws = tuple(child for child in request.live_children if not child.spec.replay_ids)
                forks = tuple(at for at, child in enumerate(request.children) if at and child.finish is None)
        return Row(request, sequence.reservation, sequence.at, chunk, begins, draws, forks)

    def _take_scores(self, row: Row, scores: list[TokenLogprobs]) -> None:
        """Account scores of given tokens, in chunks as they come: a continuation's are streamed, a prompt's gathered."""
        request, spec = row.request, row.request.spec
        if not scores:
            return
        request.scores += scores
        metrics.SCORED_TOKENS.inc(len(scores))
        if spec.is_score:
            request.noted_token()
            for token_id, logprobs in zip(row.scored_ids, scores, strict=True):
                request.output.put(OutputToken(token_id, logprobs))
            if len(request.scores) == len(spec.scored_tokens):
                self._finish(request, 0, Finish(FinishReason.LENGTH))
        elif len(request.scores) == len(spec.scored_tokens):
            request.output.put(PromptLogprobs(tuple(request.scores)))

    def _join(self, row: Row) -> None:
        """The prompt of several children has been run: from here on each goes its own way, what it replays first."""
        request = row.request
        if request.has_forked or row.chunk.stop < request.spec.num_prompt_tokens:
            return
        request.has_forked = True
        first = request.children[0]
        self._batcher.extend(first.key, len(first.answer_ids))
        for at, child in enumerate(request.children):
            sequence = _Sequence(request, row.reservation, at)
            if child.finish is not None:
                self._leave(sequence)
            elif at:
                child.num_run = request.spec.num_prompt_tokens
                self._sequences[child.key] = sequence
                num_known, num_done = child.num_known_tokens, request.spec.num_prompt_tokens
                rank, is_background = request.spec.turn.priority.rank, request.spec.is_background
                self._batcher.add(TokenCursor(child.key, 0, num_known, num_done, rank, is_background))

    def _take(self, request: DecodeRequest, child: Child, sampled: Sampled) -> None:
        """Account a sampled token: stream it, then go on or end."""
        if child.finish is not None or request.ended.done():
            return
        if not sampled.is_sound:
            self._forget(request.spec.attempt_id)
            request.end(InternalError("the model gave scores that are no finite numbers; its weights or its KV are damaged"))
            return
        sampling, token_id = child.spec.sampling, sampled.token_id
        child.take(token_id)
        if child.failure is not None:
            self._forget(request.spec.attempt_id)
            request.end(InvalidRequest(f"the answer's constraint can be followed no further ({child.failure}); simplify it"))
            return
        request.noted_token()
        request.output.put(OutputToken(token_id, sampled.logprobs, child.index))
        metrics.SAMPLED_TOKENS.inc()
        if token_id in sampling.stop_token_ids or child.is_complete:
            finish = Finish(FinishReason.STOP, token_id, child.index)
        elif child.num_sampled >= sampling.max_tokens:
            finish = Finish(FinishReason.LENGTH, index=child.index)
        else:
            self._batcher.extend(child.key)
            return
        self._finish(request, request.children.index(child), finish)

    def _finish(self, request: DecodeRequest, at: int, finish: Finish) -> None:
        """One child is over. Its blocks are free at once; those of the last one when the request has given everything back."""
        request.children[at].finish = finish
        key = request.spec.attempt_id
        if not request.live_children:
            self._forget(key)
            request.end(finish)
            return
        request.output.put(finish)
        if request.has_forked and key in self._requests:
            self._leave(_Sequence(request, self._requests[key][1], at))

    def _leave(self, sequence: _Sequence) -> None:
        """Take one child out of the batch; its blocks follow when no step can touch them."""
        self._sequences.pop(sequence.child.key, None)
        self._batcher.remove(sequence.child.key)
        self._ended_in_step.append(sequence)
        if sequence.request.spec.attempt_id not in self._in_step:
            self._release_ended()

    def _release_ended(self) -> None:
        ended, self._ended_in_step = self._ended_in_step, []
        for sequence in ended:
            self._publish(sequence.request, sequence.reservation, sequence.at)
            self._reservations.release_answer(sequence.reservation, sequence.at)

    def _grow(self) -> None:
        """Give every sequence the slots that its known tokens take, the most senior first; whoever is least senior gives way.

        No step is running, so what is given up is free at once; and nobody new is let in before all have what they need. Those
        that are still waiting for their KV are let be: a sequence that only they could make room for stands aside until they run.
        """
        stalled, self._stalled = self._stalled, {}
        for key, cursor in stalled.items():
            if key in self._sequences:
                self._batcher.add(cursor)
        with self._reservations.holdings.closed():
            for sequence in sorted(self._sequences.values(), key=lambda own: _holder(own.request).seniority):
                self._grow_one(sequence)

    def _grow_one(self, sequence: _Sequence) -> None:
        request, key = sequence.request, sequence.request.spec.attempt_id
        num_tokens = request.num_known_tokens(sequence.child)
        while key in self._requests and not self._reservations.grow(sequence.reservation, sequence.at, num_tokens):
            running = [other for other, _ in self._requests.values() if not other.ended.done()]
            if request.ended.done():
                self._forget(key)  # its own task gives its blocks back
                return
            victim = choose_victim(map(_holder, running)).key
            if victim == key and sequence.child.key in self._batcher and any(other.is_receiving for other in self.holders()):
                self._stalled[sequence.child.key] = self._batcher[sequence.child.key]
                self._batcher.remove(sequence.child.key)
                return
            self._preempt(*self._requests[victim])

    def _preempt(self, request: DecodeRequest, reservation: Reservation) -> None:
        metrics.PREEMPTED_REQUESTS.inc()
        self._forget(request.spec.attempt_id)
        self.publish(request)  # what it has left may serve its own return
        self._reservations.drop(reservation, "preempted")
        request.end(Preempted("its KV blocks were needed by requests that came before it; it goes on when there is room"))

    def _publish_begun(self, request: DecodeRequest, at: int) -> None:
        """Keep the prompt of a request that has its first token. A child that has ended left everything already."""
        owner, reservation = self._requests.get(request.spec.attempt_id, (None, None))
        if owner is request and reservation is not None and request.children[at].finish is None:
            self._publish(request, reservation, at)

    def _publish(self, request: DecodeRequest, reservation: Reservation, at: int) -> None:
        """Keep what one child has left for requests to come. A cache that cannot take it in costs nobody his blocks."""
        child = request.children[at]
        try:
            answer_ids = request.token_ids(child, request.spec.num_prompt_tokens, child.num_run)
            self._reservations.publish(reservation, at, child.num_run, answer_ids)
        except Exception:  # noqa: BLE001  # not swallowed: logged
            _log.exception("what request %s leaves cannot be kept for others", request.spec.attempt_id)

    def publish(self, request: DecodeRequest) -> None:
        """Keep what all its children have left. It has not failed, and no step touches its blocks."""
        if request.reservation is not None:
            for at in range(len(request.children)):
                self._publish(request, request.reservation, at)

    def _forget(self, key: str) -> None:
        self._beginning.pop(key, None)
        request, _ = self._requests.pop(key, (None, None))
        for child in request.children if request is not None else ():
            self._sequences.pop(child.key, None)
            self._batcher.remove(child.key)
        self._projections = deque(due for due in self._projections if due.key != key)
