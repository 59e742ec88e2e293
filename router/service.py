"""What this router can be asked, in the public messages, whatever door the question came through. Knows no transport.

Every door translates, calls one of these, and translates back: gRPC in servicer.py, HTTP in http/.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import shoal
from shoal.config.router import RouterConfig
from shoal.model_files import ModelFiles, Tokenizer
from shoal.pb.v1 import shoal_pb2
from shoal.router import instruments
from shoal.router.aborts import abort_elsewhere
from shoal.router.admission import Admission, Admitted
from shoal.router.dispatch import Dispatcher
from shoal.router.field_sizes import check_sizes
from shoal.router.generation import Generation
from shoal.router.journal import journal
from shoal.router.output import Answer
from shoal.router.quality import QualityGates
from shoal.router.registry import Registry
from shoal.router.replies import chunk_reply, complete_reply
from shoal.router.scoring import Scoring
from shoal.router.shadow import Shadows
from shoal.router.tenants import tenant_name, within_limits
from shoal.router.validation import check_model, check_token_ids
from shoal.router.worker import DECODE
from shoal.types import DType


@dataclass(frozen=True, slots=True)
class Parts:
    """What the service is made of."""

    config: RouterConfig
    model: ModelFiles
    tokenizer: Tokenizer
    admission: Admission
    dispatcher: Dispatcher
    registry: Registry
    gates: QualityGates
    shadows: Shadows


class RouterService:
    """One per router. Running requests are held by the client's id, which need not be unique. Raises shoal.errors."""

    def __init__(self, parts: Parts, clock: Callable[[], float]) -> None:
        self.parts = parts
        self._clock = clock
        self._started = clock()
        self._is_draining = False
        self._running: dict[tuple[str, str], set[Generation | Scoring]] = defaultdict(set)  # by tenant and id

    async def generate(
        self, request: shoal_pb2.GenerateRequest, time_left_s: float
    ) -> AsyncGenerator[shoal_pb2.GenerateResponse, None]:
        """Deltas when the request streams, and a complete answer for each child. Closing the generator ends both legs."""
        with journal(request.request_id, self._clock) as entry, within_limits():
            admitted = await self.parts.admission.admit(request, entry.arrived + time_left_s)
            entry.admitted(admitted)
            generation = self._generation(admitted, entry.arrived)
            entry.runs_as(generation)
            with self._registered(generation):
                try:
                    async with aclosing(generation.deltas()) as deltas:
                        async for delta in deltas:
                            if admitted.streams and delta:
                                yield chunk_reply(generation, delta)
                            if delta.ends:
                                reply = self._complete(generation, generation.answers[delta.index])
                                entry.outcome = reply.complete.finish_reason
                                yield reply
                finally:
                    self.parts.shadows.offer(admitted, generation.answers)

    async def score(self, request: shoal_pb2.ScoreRequest, time_left_s: float) -> shoal_pb2.ScoreResponse:
        """Log-probabilities of a continuation. Cancelling the call ends both legs."""
        with journal(request.request_id, self._clock) as entry, within_limits():
            admitted = await self.parts.admission.admit_score(request, entry.arrived + time_left_s)
            entry.admitted(admitted)
            scoring = Scoring(admitted, self.parts.dispatcher.start(admitted.dispatch))
            entry.runs_as(scoring)
            with self._registered(scoring):
                reply = await scoring.run(self.parts.model.config.shape, self._dtype)
            instruments.count_transfer(admitted.policy, reply.transfer)
            entry.outcome = "scored"
            return reply

    def _generation(self, admitted: Admitted, arrived: float) -> Generation:
        parts, config = self.parts, self.parts.config
        return Generation(
            admitted,
            parts.dispatcher.start(admitted.dispatch),
            parts.tokenizer.decode,
            arrived=arrived,
            flush_s=config.flush_s,
            flush_tokens=config.flush_tokens,
            max_queued_tokens=config.max_queued_tokens,
        )

    @contextmanager
    def _registered(self, running: Generation | Scoring) -> Iterator[None]:
        """While it runs, it can be aborted by its id."""
        request = running.admitted.dispatch
        instruments.PROMPT_TOKENS.inc(len(request.prompt_ids))
        if request.images:
            instruments.count_images(request.images)
        key = (tenant_name(), request.request_id)
        same_id = self._running[key]
        same_id.add(running)
        try:
            instruments.ACTIVE.inc()
            yield
        finally:
            instruments.ACTIVE.dec()
            same_id.discard(running)
            if not same_id:
                self._running.pop(key, None)

    def _complete(self, generation: Generation, answer: Answer) -> shoal_pb2.GenerateResponse:
        reply = complete_reply(generation, answer, self.parts.model.config.shape, self._dtype, self._clock())
        complete, policy = reply.complete, generation.admitted.policy
        if all(other.finish_reason is not None for other in generation.answers):  # once, with the last child
            instruments.count_transfer(policy, complete.transfer)
            instruments.observe_parts(policy, complete)
        if complete.completion_tokens > 1:
            instruments.TPOT.labels(policy).observe(complete.timings.tpot_ms / 1e3)
        return reply

    async def tokenize(self, request: shoal_pb2.TokenizeRequest) -> shoal_pb2.TokenizeResponse:
        """The ids of a prompt, as `generate` would run them; of a text also without the tokenizer's own."""
        given = shoal_pb2.GenerateRequest(model=request.model)
        if request.HasField("chat"):
            given.chat.CopyFrom(request.chat)
        elif request.HasField("text"):
            given.text = request.text
        given.images.extend(request.images)
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        prompt = await self.parts.admission.tokenize(given, add_special_tokens=add_special_tokens)
        max_context = self.parts.admission.limits.max_context
        return shoal_pb2.TokenizeResponse(token_ids=prompt.token_ids, max_context_length=max_context)

    async def detokenize(self, request: shoal_pb2.DetokenizeRequest) -> shoal_pb2.DetokenizeResponse:
        """The text of ids, special tokens included unless they are to be skipped."""
        limits = self.parts.admission.limits
        check_sizes(request)
        check_model(request.model, limits.model)
        check_token_ids(request.token_ids, limits.vocab_size, "token_ids")
        text = await asyncio.to_thread(
            self.parts.tokenizer.decode, request.token_ids, skip_special_tokens=request.skip_special_tokens
        )
        return shoal_pb2.DetokenizeResponse(text=text)

    @property
    def is_serving(self) -> bool:
        """Whether a request could be run now."""
        return self.parts.registry.can_serve and not self._is_draining

    def drain(self) -> None:
        """No longer say that requests can be run; those that come are."""
        self._is_draining = True

    async def abort(self, request_ids: Iterable[str]) -> int:
        """End the caller's running requests with these ids, with what they have; returns how many there were.

        Those that came through another router are ended by their decode worker.
        """
        ids, tenant, parts = set(request_ids), tenant_name(), self.parts
        found = [running for request_id in ids for running in self._running.get((tenant, request_id), ())]
        for running in found:
            running.abort()
        return len(found) + await abort_elsewhere(parts.registry.pool(DECODE), ids, tenant, parts.dispatcher.caller)

    def model_info(self) -> shoal_pb2.GetModelInfoResponse:
        """The served model, and what requests may ask for."""
        model, limits, vision = self.parts.model, self.parts.admission.limits, self.parts.admission.images.vision
        return shoal_pb2.GetModelInfoResponse(
            model_path=str(model.path),
            served_model_name=model.name,
            model_type=model.config.architecture,
            max_context_length=limits.max_context,
            vocab_size=limits.vocab_size,
            num_layers=limits.num_layers,
            eos_token_ids=model.config.eos_token_ids,
            bos_token_id=model.config.bos_token_id,
            allowed_visibilities=[str(policy) for policy in limits.policies],
            max_boundary_tokens=limits.max_boundary_tokens,
            revision=model.revision,
            dtype=self._dtype,
            license=model.license,
            adapter=self._adapter,
            supports_vision=vision is not None,
            image_placeholder=vision.placeholder if vision is not None else "",
            image_token_id=vision.placeholder_id if vision is not None else None,
        )

    def server_info(self) -> shoal_pb2.GetServerInfoResponse:
        """Version, uptime, running requests and the workers this router knows."""
        return shoal_pb2.GetServerInfoResponse(
            version=shoal.__version__,
            uptime_seconds=self._clock() - self._started,
            quality=self.parts.gates.report(),
            active_requests=sum(len(same_id) for same_id in self._running.values()),
            workers=[
                shoal_pb2.WorkerInfo(
                    worker_id=w.worker_id,
                    pool=w.pool,
                    address=w.address,
                    state=w.state,
                    epoch=w.epoch,
                    colocated=w.is_colocated,
                )
                for w in self.parts.registry.workers
            ],
        )

    async def loads(self) -> shoal_pb2.GetLoadsResponse:
        """What every worker that answers holds now."""
        return shoal_pb2.GetLoadsResponse(loads=await self.parts.registry.reports())

    @property
    def fingerprint(self) -> str:
        """Names the weights that answer: OpenAI's `system_fingerprint`."""
        return "-".join(("shoal", self.parts.model.revision, *([self._adapter] if self._adapter else [])))

    @property
    def _adapter(self) -> str:
        """Digest of what the decode workers merged into the model; "" for nothing, and until one is known."""
        decoders = self.parts.registry.pool(DECODE)
        return decoders[0].fingerprint.adapter if decoders else ""

    @property
    def _dtype(self) -> DType:
        """What the decode workers compute in; float32 until one is known."""
        decoders = self.parts.registry.pool(DECODE)
        return decoders[0].fingerprint.dtype if decoders else DType.FLOAT32
