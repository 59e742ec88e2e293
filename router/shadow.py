"""Replays a share of finished requests at full depth, in the background, to see what their visibility costs in quality.

A replay is two scores of the same answer's tokens, one under full depth and one under the visibility that was asked for; what
comes of it goes to quality.py. Clients come first: replays run one at a time and in the lowest class, begin only where half of a
worker stands free, end when others wait for room, are never tried again, and leave nothing in the prefix caches. What is held
(prompt and answer, in memory only, within bounds) goes as soon as it is measured or given up; tokens are never logged. Knows
requests as dispatched; knows no text.
"""

import asyncio
import logging
import random
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.config.logs import log_event, loggable
from shoal.config.shadow import ShadowConfig
from shoal.errors import CapacityExceeded, Preempted, ShoalError
from shoal.placement.quality_band import Comparison, TokenScores, compare
from shoal.router.admission import Admitted
from shoal.router.dispatch import Dispatcher
from shoal.router.instruments import SHADOW_HELD, SHADOWED
from shoal.router.legs import DispatchRequest
from shoal.router.output import Answer
from shoal.router.quality import QualityGates
from shoal.router.sampling import MAX_LOGPROBS
from shoal.router.scoring import gather_scores
from shoal.types import FinishReason, Priority, SamplingParams, Turn
from shoal.visibility import Visibility, VisibilityKind

_log = logging.getLogger(__name__)
MAX_ANSWER_TOKENS: Final = 256  # of one answer, the first ones: a replay's cost has a bound, and no answer outweighs the others
MAX_HELD: Final = 16  # requests
MAX_HELD_TOKENS: Final = 262_144  # 1 MiB
_MAX_RUN_S: Final = 120.0  # one score
_FULL: Final = Visibility(boundary_tokens=1)


@dataclass(frozen=True, slots=True)
class _Held:
    """A finished request, to be replayed. `visibility`: as asked for, resolved."""

    prompt_ids: "array[int]"
    answer_ids: "array[int]"
    visibility: Visibility
    tenant: str
    cache_salt: str
    held_at: float

    @property
    def policy(self) -> str:
        return str(self.visibility.policy)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)

    def score(self, visibility: Visibility, deadline: float) -> DispatchRequest:
        return DispatchRequest(
            request_id=f"shadow-{secrets.token_hex(8)}",
            prompt_ids=tuple(self.prompt_ids),
            visibility=visibility,
            sampling=SamplingParams(1, num_logprobs=MAX_LOGPROBS),
            deadline=deadline,
            continuation_ids=tuple(self.answer_ids),
            turn=Turn(Priority.LOW, self.tenant),
            cache_salt=self.cache_salt,
            is_shadow=True,
        )


class Shadows:
    """One per router. `offer` is called with every finished request; `run` is the background work, for ever."""

    def __init__(
        self,
        config: ShadowConfig,
        dispatcher: Dispatcher,
        gates: QualityGates,
        *,
        look_s: float = 1.0,
        max_wait_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`look_s`: how often room is looked for, and whether others wait. `max_wait_s`: how long for room."""
        self._config = config
        self._dispatcher = dispatcher
        self._gates = gates
        self._look_s = look_s
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._rng = rng or random.Random()
        self._held: deque[_Held] = deque()
        self._came = asyncio.Event()
        self._num_tokens = 0  # held

    def offer(self, admitted: Admitted, answers: Sequence[Answer]) -> None:
        """Hold the request for a replay, by chance and if it lends itself to one. Of n answers the first is replayed."""
        request, answer, asked = admitted.dispatch, answers[0], admitted.asked
        if not self._config.rate or asked.kind is VisibilityKind.FULL or not answer.tokens:
            return
        if answer.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        if request.images:
            return  # what would be held is more than ids, and image prompts are not what text is judged by
        split = asked.split(len(request.prompt_ids))
        if split.num_prefill_tokens <= split.num_anchor_tokens or self._rng.random() >= self._config.rate:
            return  # every token was run at full depth, so there is nothing to compare; or it is not chosen
        answer_ids = answer.token_ids[:MAX_ANSWER_TOKENS]
        num_tokens = len(request.prompt_ids) + len(answer_ids)
        if len(self._held) >= MAX_HELD or self._num_tokens + num_tokens > MAX_HELD_TOKENS:
            self._count(str(asked.policy), "no_memory")
            return
        own = array("I", request.prompt_ids), array("I", answer_ids)
        self._held.append(_Held(*own, asked, request.turn.tenant, request.cache_salt, self._clock()))
        self._num_tokens += num_tokens
        SHADOW_HELD.set(len(self._held))
        self._came.set()

    async def run(self) -> None:
        """Measure what is held, one after the other."""
        try:
            while True:
                while not self._held:
                    self._came.clear()
                    await self._came.wait()
                held = self._held[0]  # counts as held until it is over
                outcome = "stopped"
                try:
                    outcome = await self._measure(held)
                finally:
                    self._count(held.policy, outcome)
                    self._drop()
        finally:
            while self._held:
                self._count(self._held[0].policy, "stopped")
                self._drop()

    def _drop(self) -> None:
        self._num_tokens -= self._held.popleft().num_tokens
        SHADOW_HELD.set(len(self._held))

    async def _measure(self, held: _Held) -> str:
        """What became of it."""
        gate = self._dispatcher.gate
        waits_for = [held.score(visibility, self._clock() + _MAX_RUN_S) for visibility in (_FULL, held.visibility)]
        while not all(gate.has_spare(request) for request in waits_for):
            if self._clock() - held.held_at > self._max_wait_s:
                return "busy"
            await asyncio.sleep(self._look_s)
        replay = asyncio.create_task(self._replay(held), name="shadow request")
        try:
            while not (await asyncio.wait({replay}, timeout=self._look_s))[0]:
                if gate.is_pressed():
                    return "gave_way"
        finally:
            replay.cancel()
            await asyncio.wait({replay})  # so that both legs have ended
        return self._take(held, replay)

    async def _replay(self, held: _Held) -> Comparison:
        full, shallow = [
            await gather_scores(self._dispatcher.start(held.score(visibility, self._clock() + _MAX_RUN_S)))
            for visibility in (_FULL, held.visibility)
        ]
        return compare(*([TokenScores(t.token_id, t.logprob or 0.0, t.top) for t in scores] for scores in (full, shallow)))

    def _take(self, held: _Held, replay: "asyncio.Task[Comparison]") -> str:
        error = replay.exception()
        match error:
            case None:
                sample = replay.result()
                log_event(
                    _log, logging.DEBUG, "shadow request measured", visibility=held.policy, tokens=sample.num_tokens,
                    agreeing_tokens=sample.num_agreeing, kl_nats=sample.kl_nats,
                )  # fmt: skip
                self._gates.take(held.policy, sample)
                return "measured"
            case CapacityExceeded():
                return "busy"
            case Preempted():
                return "gave_way"
            case ShoalError():
                log_event(_log, logging.WARNING, "shadow request failed", visibility=held.policy, error=loggable(error))
            case _:  # a bug must not end the service; its traceback tells
                _log.error("shadow request failed", exc_info=error)
        return "failed"

    def _count(self, policy: str, outcome: str) -> None:
        SHADOWED.labels(policy, outcome).inc()
