"""One process, one pool, every visibility: the reference that disaggregated serving must equal, token for token (design §2).

Knows requests, steps and blocks; knows no worker, no wire and no text (stop strings belong to whoever holds the tokenizer).
A step is decide → execute → account. A request's whole need is reserved before it runs, so nothing is ever preempted.
"""

from collections.abc import Iterable
from dataclasses import replace

from shoal.engine.decoder import Decoder
from shoal.engine.kv_pool import KvPool
from shoal.engine.local_request import LocalRequest, LocalResult, LocalToken, RunningRequest
from shoal.engine.sampling import ConstraintMaker, Picked, TokenConstraint, TokenCounts, Want, pick
from shoal.engine.segment import RequestKv, Segment
from shoal.engine.vision import PromptImages, VisionEncoder
from shoal.errors import AlreadyExists, InternalError, InvalidRequest, ShoalError, Unsupported
from shoal.model_files import check_images
from shoal.placement.batching import Batcher, TokenCursor
from shoal.placement.blocks import BlockPool
from shoal.placement.reservation import ReservationSize, check_fits_ever, decode_reservation
from shoal.placement.tables import KvLayout, RequestTables
from shoal.types import FinishReason, TokenLogprobs
from shoal.visibility import Visibility

__all__ = ["LocalEngine", "LocalRequest", "LocalResult", "LocalToken"]


class LocalEngine:
    """A continuous batch over one decoder: requests join and leave at every step. Not thread-safe: one thread steps it."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        *,
        token_budget: int = 512,
        max_step_requests: int = 256,
        make_constraint: ConstraintMaker | None = None,
        vision: VisionEncoder | None = None,
    ) -> None:
        """`vision`: sees the images of prompts, where the model does; closed by whoever made it."""
        if token_budget < 1 or max_step_requests < 1:
            raise InvalidRequest("token_budget and max_step_requests must be at least 1")
        self._decoder = decoder
        self._pool = pool
        self._token_budget = token_budget
        self._max_step_requests = max_step_requests
        self._make_constraint = make_constraint
        self._vision = vision
        self.blocks = BlockPool(pool.num_blocks)
        self._batcher = Batcher()
        self._waiting: dict[str, tuple[LocalRequest, ReservationSize, PromptImages | None]] = {}  # in order of arrival
        self._running: dict[str, RunningRequest] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}  # by key, until `run` hands them out

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs; then every block is free."""
        return not self._waiting and not self._running

    def submit(self, key: str, request: LocalRequest) -> None:
        """Queue a request; it joins a step when its blocks are free.

        Raises AlreadyExists for a key in use, InvalidRequest (before any work) for one that can never run, Unsupported for a
        constraint where none can be made.
        """
        if key in self._waiting or key in self._running:
            raise AlreadyExists(f"request {key} is being served already")
        shape = self._decoder.config.shape
        visibility = request.resolve(shape.num_layers)
        given = request.prompt_ids + request.replay_token_ids + request.continuation_ids
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        if not all(0 <= token < shape.vocab_size for token in given):
            raise InvalidRequest(f"token ids must lie in 0…{shape.vocab_size - 1}")
        if len(request.prompt_ids) + request.num_answer_tokens > shape.max_context:
            raise InvalidRequest(
                f"{len(given)} tokens + max_tokens {request.sampling.max_tokens} exceed the context of {shape.max_context}; "
                f"shorten the prompt or lower max_tokens"
            )
        self._constrain(request)
        images = self._see(request, visibility)
        size = decode_reservation(
            shape,
            self._pool.dtype,
            self._pool.block_size,
            visibility,
            len(request.prompt_ids),
            request.num_answer_tokens,
        )
        check_fits_ever(size, self.blocks.num_blocks)
        self._prompt_logprobs.pop(key, None)
        self._waiting[key] = (request, size, images)

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
        wants: dict[str, Want] = {}
        for chunk in chunks:
            running = self._running[chunk.key]
            segments += running.segments(chunk)
            if chunk.stop > running.tables.layout.split.num_prefill_tokens:
                wants[chunk.key] = running.want(chunk)

        logits = self._decoder.forward(segments, self._pool).run().logits
        picked = pick(logits, list(wants.values()))

        for chunk in chunks:
            self._batcher.complete(chunk)
        return [token for key, own in zip(wants, picked, strict=True) for token in self._hand_out(key, own)]

    def run(self) -> dict[str, LocalResult]:
        """Step until idle; the answers of everything that was queued or running, by key."""
        tokens: dict[str, list[LocalToken]] = {}
        while not self.is_idle:
            for token in self.step():
                tokens.setdefault(token.key, []).append(token)
        return {key: _result(own, self._prompt_logprobs.pop(key, [])) for key, own in tokens.items()}

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
        for key, (request, size, images) in list(self._waiting.items()):
            if size.num_blocks > self.blocks.num_free:
                return
            del self._waiting[key]
            config = self._decoder.config
            layout = KvLayout.of(config.shape.num_layers, request.resolve(config.shape.num_layers), len(request.prompt_ids))
            tables = RequestTables(self.blocks, self._pool.block_size, layout)
            tables.reserve(size.num_lower_slots, size.num_upper_slots)
            sampling = request.sampling
            eos = () if sampling.ignore_eos else config.eos_token_ids
            sampling = replace(sampling, stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *eos))))
            counts = TokenCounts(request.prompt_ids, request.replay_token_ids) if sampling.has_penalties else None
            tokens = [*request.prompt_ids, *(request.continuation_ids or request.replay_token_ids)]
            request = replace(request, sampling=sampling)
            kv = RequestKv.of(tables, images)
            self._running[key] = RunningRequest(request, tables, kv, tokens, counts, self._constrain(request))
            num_to_run = len(tokens) - 1 if request.continuation_ids else len(tokens)
            whole = images.whole if images is not None else ()
            # a step may hold its last prefill and first decode tokens
            self._batcher.add(TokenCursor(key, 0, num_to_run, 0, whole=whole))

    def _see(self, request: LocalRequest, visibility: Visibility) -> PromptImages | None:
        """Check and see a request's images. Raises InvalidRequest, Unsupported where nothing here sees any."""
        vision, split = self._vision, visibility.split(len(request.prompt_ids))
        if request.images and vision is None:
            raise Unsupported("this engine sees no images; send text alone, or make it with the model's VisionEncoder")
        spans = [image.span for image in request.images]
        check_images(
            None if vision is None else vision.config,
            request.prompt_ids,
            spans,
            num_prefill_tokens=split.num_prefill_tokens,
            num_anchor_tokens=split.num_anchor_tokens,
            prefill_layers=visibility.depth(self._decoder.config.shape.num_layers),
        )
        if vision is None or not spans:
            return None
        return PromptImages.of(vision.config, spans, vision.encode(request.images))

    def _constrain(self, request: LocalRequest) -> TokenConstraint | None:
        """What the answer is held to, from where the replayed tokens left it."""
        sampling = request.sampling
        if sampling.constraint is None:
            return None
        if self._make_constraint is None:
            raise Unsupported("this engine has no tokenizer to constrain answers with; leave the constraint out")
        constraint = self._make_constraint(sampling.constraint, sampling.stop_token_ids)
        for token_id in request.replay_token_ids:
            constraint.accept(token_id)
        return constraint

    def _hand_out(self, key: str, picked: Picked) -> list[LocalToken]:
        """Scored tokens of a continuation, then the one that was drawn. Scores of the prompt are kept."""
        running = self._running[key]
        request = running.request
        tokens: list[LocalToken] = []
        if request.continuation_ids:
            for logprobs in picked.scores:
                token_id = request.continuation_ids[running.num_scored]
                running.num_scored += 1
                reason = FinishReason.LENGTH if running.num_scored == len(request.continuation_ids) else None
                tokens.append(LocalToken(key, token_id, logprobs, reason))
        elif picked.scores:
            self._prompt_logprobs.setdefault(key, []).extend(picked.scores)
        for sampled in picked.drawn:
            if not sampled.is_sound:
                self.cancel(key)
                raise InternalError("the model gave scores that are no finite numbers; its weights or its KV are damaged")
            running.tokens.append(sampled.token_id)
            running.num_sampled += 1
            reason, constraint = None, running.constraint
            if running.counts is not None:
                running.counts.add(sampled.token_id)
            if constraint is not None:
                constraint.accept(sampled.token_id)
                if constraint.failure is not None:
                    self.cancel(key)
                    raise InvalidRequest(
                        f"the answer's constraint can be followed no further ({constraint.failure}); simplify it"
                    )
            if sampled.token_id in request.sampling.stop_token_ids or (constraint is not None and constraint.is_complete):
                reason = FinishReason.STOP
            elif running.num_sampled == request.sampling.max_tokens:
                reason = FinishReason.LENGTH
            else:
                self._batcher.extend(key)
            tokens.append(LocalToken(key, sampled.token_id, sampled.logprobs, reason))
        if tokens and tokens[-1].finish_reason is not None:
            self.cancel(key)
        return tokens


def _result(tokens: list[LocalToken], prompt_logprobs: list[TokenLogprobs]) -> LocalResult:
    logprobs = tuple(token.logprobs for token in tokens if token.logprobs is not None)
    token_ids = tuple(token.token_id for token in tokens)
    return LocalResult(token_ids, logprobs, tokens[-1].finish_reason or FinishReason.ABORT, tuple(prompt_logprobs))
