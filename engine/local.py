"""One process, one pool, every visibility: the reference that disaggregated serving must equal, token for token (design §2).

Knows requests, steps and blocks; knows no worker, no wire and no text (stop strings belong to whoever holds the tokenizer).
A step is decide → execute → account. A request's whole need is reserved before it runs, so nothing is ever preempted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from shoal.engine.decoder import Decoder
from shoal.engine.kv_pool import KvPool
from shoal.engine.sampler import Sampled, SampleRow, sample
from shoal.engine.segment import (
    LogitRows,
    RequestKv,
    Segment,
    anchor_segment,
    decode_segment,
    late_projection_segment,
    prefill_segments,
)
from shoal.errors import AlreadyExists, InvalidRequest, ShoalError
from shoal.placement.batching import Batcher, Chunk, TokenCursor
from shoal.placement.blocks import BlockPool
from shoal.placement.reservation import ReservationSize, check_fits_ever, decode_reservation
from shoal.placement.tables import KvLayout, RequestTables
from shoal.types import FinishReason, SamplingParams, TokenLogprobs
from shoal.visibility import Visibility, VisibilityKind


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """What to generate. The visibility need not be resolved; an absent boundary becomes 1."""

    prompt_ids: tuple[int, ...]
    visibility: Visibility
    sampling: SamplingParams  # max_tokens counts what is still to be sampled
    replay_token_ids: tuple[int, ...] = ()  # generated before; run as decode tokens, not handed out again
    child: int = 0  # which of several answers to one request


@dataclass(frozen=True, slots=True)
class LocalToken:
    """One token of one request, as a step hands it out."""

    key: str
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None  # set on the last one


@dataclass(frozen=True, slots=True)
class LocalResult:
    """A whole answer. A stop id is part of it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # empty unless asked for
    finish_reason: FinishReason


@dataclass(slots=True)
class _Running:
    """A request that owns its blocks."""

    request: LocalRequest
    stop_ids: frozenset[int]
    tables: RequestTables
    kv: RequestKv
    tokens: list[int]  # prompt, replayed, generated
    num_sampled: int = 0
    deep_states: list[tuple[range, torch.Tensor]] = field(default_factory=list)  # what prefill "ships", until next it runs

    @property
    def sample_row(self) -> SampleRow:
        return SampleRow(self.request.sampling, self.request.child, len(self.tokens))


class LocalEngine:
    """A continuous batch over one decoder: requests join and leave at every step. Not thread-safe: one thread steps it."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        *,
        token_budget: int = 512,
        max_step_requests: int = 256,
    ) -> None:
        if token_budget < 1 or max_step_requests < 1:
            raise InvalidRequest("token_budget and max_step_requests must be at least 1")
        self._decoder = decoder
        self._pool = pool
        self._token_budget = token_budget
        self._max_step_requests = max_step_requests
        self.blocks = BlockPool(pool.num_blocks)
        self._batcher = Batcher()
        self._waiting: dict[str, tuple[LocalRequest, ReservationSize]] = {}  # in order of arrival
        self._running: dict[str, _Running] = {}

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs; then every block is free."""
        return not self._waiting and not self._running

    def submit(self, key: str, request: LocalRequest) -> None:
        """Queue a request; it joins a step when its blocks are free.

        Raises AlreadyExists for a key in use, InvalidRequest (before any work) for one that can never run.
        """
        if key in self._waiting or key in self._running:
            raise AlreadyExists(f"request {key} is being served already")
        shape = self._decoder.config.shape
        visibility = request.visibility.resolve(shape.num_layers)
        num_tokens = len(request.prompt_ids) + len(request.replay_token_ids)
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        if not all(0 <= token < shape.vocab_size for token in request.prompt_ids + request.replay_token_ids):
            raise InvalidRequest(f"token ids must lie in 0…{shape.vocab_size - 1}")
        if num_tokens + request.sampling.max_tokens > shape.max_context:
            raise InvalidRequest(
                f"{num_tokens} tokens + max_tokens {request.sampling.max_tokens} exceed the context of {shape.max_context}; "
                f"shorten the prompt or lower max_tokens"
            )
        size = decode_reservation(
            shape,
            self._pool.dtype,
            self._pool.block_size,
            visibility,
            len(request.prompt_ids),
            request.sampling.max_tokens,
            num_replay_tokens=len(request.replay_token_ids),
        )
        check_fits_ever(size, self.blocks.num_blocks)
        self._waiting[key] = (request, size)

    def cancel(self, key: str) -> None:
        """Drop a request and free its blocks; harmless for unknown and finished ones."""
        self._waiting.pop(key, None)
        self._batcher.remove(key)
        running = self._running.pop(key, None)
        if running is not None:
            running.tables.release()

    def step(self) -> list[LocalToken]:
        """Admit what fits, run one step, and hand out the tokens it sampled."""
        self._admit()
        chunks = self._batcher.next_step(self._token_budget, self._max_step_requests)
        if not chunks:
            return []
        segments: list[Segment] = []
        sampling: list[str] = []
        keepers: dict[int, _Running] = {}
        for chunk in chunks:
            running = self._running[chunk.key]
            for segment in _segments(running, chunk):
                if segment.keep_states:
                    keepers[len(segments)] = running
                if segment.logits is not LogitRows.NONE:
                    sampling.append(chunk.key)
                segments.append(segment)

        forward = self._decoder.forward(segments, self._pool).run()
        drawn = sample(forward.logits, [self._running[key].sample_row for key in sampling])

        for index, running in keepers.items():
            running.deep_states.append((segments[index].positions, forward.states[index]))
        for chunk in chunks:
            self._batcher.complete(chunk)
        return [self._hand_out(key, sampled) for key, sampled in zip(sampling, drawn, strict=True)]

    def run(self) -> dict[str, LocalResult]:
        """Step until idle; the answers of everything that was queued or running, by key."""
        tokens: dict[str, list[LocalToken]] = {}
        while not self.is_idle:
            for token in self.step():
                tokens.setdefault(token.key, []).append(token)
        return {key: _result(own) for key, own in tokens.items()}

    def generate(self, requests: Iterable[LocalRequest]) -> list[LocalResult]:
        """Run some requests to their ends as one continuous batch. When one is refused, none runs and none stays queued."""
        keys: list[str] = []
        try:
            for index, request in enumerate(requests):
                self.submit(f"generate-{index}", request)
                keys.append(f"generate-{index}")
        except ShoalError:
            for key in keys:
                self.cancel(key)
            raise
        results = self.run()
        return [results[key] for key in keys]

    def _admit(self) -> None:
        """In order of arrival, nobody overtaking: a large request must not starve behind small ones."""
        for key, (request, size) in list(self._waiting.items()):
            if size.num_blocks > self.blocks.num_free:
                return
            del self._waiting[key]
            config = self._decoder.config
            visibility = request.visibility.resolve(config.shape.num_layers)
            layout = KvLayout.of(config.shape.num_layers, visibility, len(request.prompt_ids))
            tables = RequestTables(self.blocks, self._pool.block_size, layout)
            tables.reserve(size.num_lower_slots, size.num_upper_slots)
            eos = () if request.sampling.ignore_eos else config.eos_token_ids
            stop_ids = frozenset(eos).union(request.sampling.stop_token_ids)
            tokens = [*request.prompt_ids, *request.replay_token_ids]
            self._running[key] = _Running(request, stop_ids, tables, RequestKv.of(tables), tokens)
            self._batcher.add(TokenCursor(key, layout.split.num_prefill_tokens, len(tokens), 0))

    def _hand_out(self, key: str, sampled: Sampled) -> LocalToken:
        running = self._running[key]
        running.tokens.append(sampled.token_id)
        running.num_sampled += 1
        reason: FinishReason | None = None
        if sampled.token_id in running.stop_ids:
            reason = FinishReason.STOP
        elif running.num_sampled == running.request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            self._batcher.extend(key)
        else:
            self.cancel(key)
        return LocalToken(key, sampled.token_id, sampled.logprobs, reason)


def _segments(running: _Running, chunk: Chunk) -> list[Segment]:
    """What one chunk runs. Deep states of earlier chunks enter with it, ahead of it."""
    layout, kv = running.tables.layout, running.kv
    enter = anchor_segment if layout.visibility.kind is VisibilityKind.SPEED else late_projection_segment
    segments = [enter(kv, states, positions) for positions, states in running.deep_states]
    running.deep_states.clear()
    positions, token_ids = range(chunk.start, chunk.stop), running.tokens[chunk.start : chunk.stop]
    if chunk.stop <= layout.split.num_prefill_tokens:
        return segments + prefill_segments(kv, token_ids, positions)
    logits = LogitRows.LAST if chunk.stop == len(running.tokens) else LogitRows.NONE
    return [*segments, decode_segment(kv, token_ids, positions, logits)]


def _result(tokens: list[LocalToken]) -> LocalResult:
    logprobs = tuple(token.logprobs for token in tokens if token.logprobs is not None)
    return LocalResult(tuple(token.token_id for token in tokens), logprobs, tokens[-1].finish_reason or FinishReason.ABORT)
