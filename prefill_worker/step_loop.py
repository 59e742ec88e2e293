"""Shallow prefill: the continuous batch of a prefill worker. Knows tasks and segments; knows no transport and never samples.

As soon as a layer of a step has its KV, the plan entries this completes are handed to the transfer, while later layers compute.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from shoal.config.worker import WorkerConfig
from shoal.engine.resident import Resident
from shoal.engine.segment import RequestKv, Segment, prefill_segments
from shoal.engine.state_store import StateStore
from shoal.engine.step_loop import StepLoop
from shoal.errors import InternalError
from shoal.placement.batching import Batcher, Chunk, TokenCursor
from shoal.prefill_worker import metrics
from shoal.prefill_worker.task import PrefillTask, TaskState


@dataclass(frozen=True, slots=True)
class Work:
    """A task and where its KV lives."""

    task: PrefillTask
    kv: RequestKv
    states: StateStore | None


@dataclass(frozen=True, slots=True)
class Piece:
    """One task's chunk of a step."""

    work: Work
    chunk: Chunk


PrefillStep = tuple[Piece, ...]


class PrefillStepLoop(StepLoop[PrefillStep, None]):
    """`add` brings work, `remove` takes a task out. `layer_done` is a test's seam: called in the step thread per layer."""

    def __init__(self, resident: Resident, config: WorkerConfig, *, layer_done: Callable[[int], object] | None) -> None:
        super().__init__("prefill-step", config.num_threads)
        self._resident = resident
        self._config = config
        self._layer_done = layer_done
        self._batcher = Batcher()
        self._work: dict[str, Work] = {}

    @property
    def num_running(self) -> int:
        return len(self._batcher)

    def add(self, work: Work) -> None:
        """The task has its blocks: compute it."""
        if work.task.ended.done():
            return
        key, num_tokens = work.task.spec.attempt_id, len(work.task.spec.token_ids)
        self._work[key] = work
        rank, is_background = work.task.spec.turn.priority.rank, work.task.spec.is_background
        whole = work.kv.images.whole if work.kv.images is not None else ()
        work.task.num_computed = work.task.num_cached
        self.tally.prompts.add(num_tokens - work.task.num_cached)
        self._batcher.add(TokenCursor(key, num_tokens, num_tokens, work.task.num_cached, rank, is_background, whole))
        work.task.complete(work.task.export.states_kept(work.task.num_cached))
        work.task.end_step()
        self.wake()

    async def remove(self, key: str) -> None:
        """Take a task out and return once no step touches its blocks. Harmless when it is not here."""
        self._forget(key)
        self.wake()
        await self.outside_step(key)

    def decide(self) -> PrefillStep | None:
        chunks = self._batcher.next_step(self._config.token_budget, self._config.max_running_requests)
        for chunk in chunks:
            task = self._work[chunk.key].task
            if task.state is TaskState.HOLDING:
                task.move(TaskState.COMPUTING)
            task.begin_step()
        return tuple(Piece(self._work[chunk.key], chunk) for chunk in chunks) or None

    def keys(self, step: PrefillStep) -> Collection[str]:
        return {piece.chunk.key for piece in step}

    def execute(self, step: PrefillStep) -> None:
        segments: list[Segment] = []
        owners: list[Piece] = []
        for piece in step:
            positions = range(piece.chunk.start, piece.chunk.stop)
            ids = piece.work.task.spec.token_ids[positions.start : positions.stop]
            mine = prefill_segments(piece.work.kv, ids, positions)
            segments += mine
            owners += [piece] * len(mine)
        step_pass = self._resident.decoder.forward(segments, self._resident.pool)
        if self._layer_done is None:
            step_pass.listen(lambda layer: any([piece.work.task.hears(layer, piece.chunk.stop) for piece in step]))
        first = 0  # layer that nobody has been told of
        for layer in step_pass:
            if self._layer_done is not None:
                self._layer_done(layer)
            for piece in step:
                piece.work.task.written(range(first, layer + 1), piece.chunk.stop)
            first = layer + 1
        for piece in step:
            piece.work.task.written(range(first, self._resident.shape.num_layers), piece.chunk.stop)
        for index, states in step_pass.states.items():
            _keep(owners[index].work, segments[index].positions, states)
        for piece in step:
            piece.work.task.end_step()

    def account(self, step: PrefillStep, result: None, seconds: float) -> None:
        metrics.STEP_SECONDS.observe(seconds)
        specs = [piece.work.task.spec for piece in step]
        if not all(spec.is_background for spec in specs):  # their small pieces say nothing of the pace
            depths = (len(spec.layout.lower_layers) for spec in specs)
            self.rate.ran(sum(depth * piece.chunk.num_tokens for depth, piece in zip(depths, step, strict=True)), seconds)
        metrics.STEP_REQUESTS.observe(len(step))
        num_tokens = sum(piece.chunk.num_tokens for piece in step)
        metrics.PREFILL_TOKENS.inc(num_tokens)
        self.tally.stepped(len(step), num_tokens, seconds)
        for piece in step:
            self._batcher.complete(piece.chunk)
            task = piece.work.task
            task.num_computed = piece.chunk.stop
            if piece.chunk.stop == len(task.spec.token_ids) and piece.chunk.key in self._work:
                self._forget(piece.chunk.key)
                if task.export.num_pending:
                    task.end(InternalError(f"{task.export.num_pending} plan entries were left when a task had been computed"))
                else:
                    task.move(TaskState.COMPUTED)
        if self._config.check_blocks:
            self._resident.blocks.check()

    def failed(self, step: PrefillStep) -> None:
        for piece in step:
            self._forget(piece.chunk.key)
            piece.work.task.end(InternalError("a step of the prefill worker failed"))

    def _forget(self, key: str) -> None:
        self._work.pop(key, None)
        self._batcher.remove(key)


def _keep(work: Work, positions: range, states: torch.Tensor) -> None:
    """Park the states [n, h] that the plan ships (decode may hold some already, or see only the last of them)."""
    if work.states is None:
        return
    due = range(max(positions.start, work.states.positions.start), min(positions.stop, work.states.positions.stop))
    if due:
        work.states.write(due.start, states[due.start - positions.start : due.stop - positions.start])
    work.task.complete(work.task.export.states_kept(positions.stop))
