"""Chooses workers for a request and tries again, within bounds, when they fail. Knows no client and no text.

A failed request starts anew on other workers; tokens it has already produced are replayed there as decode tokens, so the
stream goes on without loss or repeat. Every retry is a metric, a log line and a notice in the response. What a draining worker
hands over goes on in the same way, and uses none of the tries that a request has for failures.
"""

import logging
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Final

from shoal.config.disaggregation import NEVER_LOCAL, DisaggregationRule
from shoal.config.logs import log_event, loggable
from shoal.errors import CapacityExceeded, Preempted, ShoalError, Unavailable, Unsupported
from shoal.pb.internal.v1 import worker_pb2
from shoal.placement.balance import choose_pair
from shoal.placement.cost import request_token_layers
from shoal.router.affinity import PrefixMemory
from shoal.router.attempt import Attempt, AttemptReport
from shoal.router.gate import Gate
from shoal.router.instruments import FALLBACKS, PREEMPTED, RESUMED, RETRIES
from shoal.router.legs import DispatchRequest
from shoal.router.output import ChildEnd, Output, OutputToken, PromptLogprobs
from shoal.router.registry import Registry
from shoal.router.worker import DECODE, PREFILL, Worker
from shoal.types import FinishReason, ModelShape

_log = logging.getLogger(__name__)
_EXPECTED_TOKENS: Final = 256  # what an answer is taken to cost in the balance when max_tokens allows more


@dataclass(slots=True)
class DispatchReport:
    """How a request was served; filled in as it runs. `attempt` is the latest."""

    attempt: AttemptReport = field(default_factory=AttemptReport)
    num_retries: int = 0
    num_preemptions: int = 0
    num_handovers: int = 0  # of those: a worker drained, nothing failed
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Placed:
    """The workers of an attempt. No prefill worker: decode runs all there is to run, for want of one if `falls_back`."""

    decode: Worker
    prefill: Worker | None
    falls_back: bool = False


class Dispatcher:
    """Runs requests over the registry's workers."""

    def __init__(
        self,
        registry: Registry,
        shape: ModelShape,
        *,
        max_retries: int,
        max_wait_s: float = 0.0,
        disaggregation: DisaggregationRule = NEVER_LOCAL,
        falls_back: bool = False,
        rng: random.Random | None = None,
        caller: str = "",
    ) -> None:
        """`falls_back`: decode prefills what no prefill worker can be found for."""
        self._memory = PrefixMemory()
        self.gate = Gate(registry, shape, max_wait_s, disaggregation=disaggregation)
        self._falls_back = falls_back
        self._registry = registry
        self._shape = shape
        self._max_retries = max_retries
        self._rng = rng or random.Random()
        self.caller = caller  # what workers know this router by
        self._token_layers = lru_cache(maxsize=1024)(partial(request_token_layers, shape))  # by visibility and lengths
        local_tokens, local_share = disaggregation.local_prefill_tokens, disaggregation.local_cached_share
        self._local_prefill = {
            alone: worker_pb2.LocalPrefill(below_tokens=local_tokens, cached_share=local_share, no_prefill_worker=alone)
            for alone in (False, True)
        }

    def start(self, request: DispatchRequest) -> "Dispatch":
        """Prepare to run a request; nothing is sent before its tokens are asked for."""
        digests = self._memory.digests(request, self._shape.num_layers)
        return Dispatch(self, request, digests)

    def choose(
        self, request: DispatchRequest, digests: Sequence[bytes], failed: set[tuple[str, int]], full: set[tuple[str, int]]
    ) -> Placed:
        """A decode worker and, unless it runs the prefill tokens itself, a prefill worker. Raises Unavailable with words.

        What decode has cached is known only to itself, so it may yet run what a prefill worker was chosen for, never the reverse.
        Workers that failed this request, or do not answer, are chosen only when there is nobody else; full ones never. Images
        are for prefill workers: nobody steps in for them. Raises Unsupported for them in a colocated cluster.
        """
        needs_prefill = self.gate.needs_prefill(request)
        if needs_prefill and self._falls_back and not request.images:
            try:
                return self._choose(request, digests, failed, full, needs_prefill=True, spares_prefill=True)
            except Unavailable:
                return replace(self._choose(request, digests, failed, full, needs_prefill=False), falls_back=True)
        return self._choose(request, digests, failed, full, needs_prefill=needs_prefill)

    def _choose(
        self,
        request: DispatchRequest,
        digests: Sequence[bytes],
        failed: set[tuple[str, int]],
        full: set[tuple[str, int]],
        *,
        needs_prefill: bool,
        spares_prefill: bool = False,
    ) -> Placed:
        """`spares_prefill`: a prefill worker that failed this request is not asked again."""
        pools = {pool: {w.worker_id: w for w in self._registry.pool(pool) if w.key not in full} for pool in (PREFILL, DECODE)}
        if request.images and pools[DECODE]:
            pools[DECODE] = {name: worker for name, worker in pools[DECODE].items() if not worker.is_colocated}
            if not pools[DECODE]:
                raise Unsupported("images need a pool of prefill workers, which this cluster has not (it is colocated)")
        silent = {w.key for workers in pools.values() for w in workers.values() if not w.answers}
        decoders = {worker.key for worker in pools[DECODE].values()}
        held, depth = self._memory.held(digests), request.visibility.depth(self._shape.num_layers)
        views = {pool: [worker.view(held.get(worker.key, 0) * depth) for worker in pools[pool].values()] for pool in pools}
        avoidances = [failed | silent, failed, failed - decoders, failed & decoders, set()]
        for avoided in avoidances[: 3 if spares_prefill else 5]:
            excluded = frozenset(w.worker_id for workers in pools.values() for w in workers.values() if w.key in avoided)
            try:
                pair = choose_pair(
                    views[DECODE],
                    views[PREFILL],
                    request.placed_visibility,
                    self._rng,
                    needs_prefill=needs_prefill,
                    excluded=excluded,
                )
            except Unavailable as error:
                reason = error
                continue
            prefill = None if pair.prefill is None else pools[PREFILL][pair.prefill.worker_id]
            return Placed(pools[DECODE][pair.decode.worker_id], prefill)
        raise reason

    def attempt(
        self, request: DispatchRequest, digests: Sequence[bytes], replays: Mapping[int, tuple[int, ...]], placed: Placed
    ) -> Attempt:
        """The next try of a request, on these workers; they are remembered for prompts that begin alike."""
        workers = [worker for worker in (placed.decode, placed.prefill) if worker is not None]
        if not request.is_shadow:
            self._memory.sent(digests, [worker.key for worker in workers])
        num_tokens = len(replays) * min(request.num_expected_tokens, _EXPECTED_TOKENS)
        cost = self._token_layers(request.visibility, len(request.prompt_ids), num_tokens)
        local = self._local_prefill[placed.falls_back]
        return Attempt(request, replays, placed.decode, placed.prefill, cost, local, self.caller)

    def may_retry(self, report: DispatchReport) -> bool:
        return report.num_retries - report.num_handovers < self._max_retries


class Dispatch:
    """One request on its way, over as many attempts as it takes."""

    def __init__(self, dispatcher: Dispatcher, request: DispatchRequest, digests: Sequence[bytes]) -> None:
        self.report = DispatchReport(notices=list(request.notices))
        self._dispatcher = dispatcher
        self._request = request
        self._digests = digests  # of the prompt's beginning
        self._attempt: Attempt | None = None
        self._token_ids: dict[int, list[int]] = {index: [] for index in range(request.num_children)}  # of what still runs
        self._num_scored = 0
        self._has_prompt_logprobs = False

    @property
    def continuation_ids(self) -> tuple[int, ...]:
        """What is scored; none where tokens are sampled."""
        return self._request.continuation_ids

    async def outputs(self) -> AsyncGenerator[list[Output], None]:
        """Tokens, each once, and the end of each child. Raises what no retry could mend."""
        failed: set[tuple[str, int]] = set()
        full = set() if self._request.is_shadow else self._dispatcher.gate.crowded(self._request)
        error: ShoalError | None = None
        while self._token_ids:
            try:
                placed = self._dispatcher.choose(self._request, self._digests, failed, full)
            except Unavailable as nobody:
                raise error or nobody from None
            replays = {index: tuple(token_ids) for index, token_ids in self._token_ids.items()}
            if placed.falls_back:
                self._declare("no prefill worker can take the request: its prompt is prefilled on the decode worker", "prefill")
            self._dispatcher.gate.sent(self._request, placed.decode, placed.prefill)
            self._attempt = self._dispatcher.attempt(self._request, self._digests, replays, placed)
            self.report.attempt = self._attempt.report
            try:
                async with aclosing(self._attempt.outputs()) as batches:
                    num_to_skip = self._num_scored
                    async for batch in batches:
                        if num_to_skip:  # a score is not resumed: it starts anew, and what was told is not told again
                            batch, num_to_skip = batch[num_to_skip:], max(0, num_to_skip - len(batch))
                        if new := self._account(batch):
                            yield new
            except Preempted:
                if self._request.is_shadow:
                    raise
                self._resume()
            except (Unavailable, CapacityExceeded) as failure:
                error = failure
                if ends := self._lost_ends():
                    yield [*ends]
                if not self._token_ids:
                    return
                handed_over = self._attempt.was_handed_over
                if self._request.is_shadow or not (handed_over or self._dispatcher.may_retry(self.report)):
                    raise
                blamed = self._attempt.report.failed
                (full if isinstance(failure, CapacityExceeded) else failed).update(blamed)
                self._retry(failure, handed_over=handed_over)

    def end_child(self, index: int) -> None:
        """This child's answer is complete, for a reason that decode does not know; the others go on."""
        if self._token_ids.pop(index, None) is not None and self._token_ids and self._attempt is not None:
            self._attempt.end_children((index,))

    async def settle(self) -> None:
        """Let the prefill leg's figures arrive, when the answer ends before decode says so."""
        if self._attempt is not None:
            await self._attempt.settle()

    def _account(self, batch: list[Output]) -> list[Output]:
        """Note what each child has generated; leaves out what was said before, or of children that have ended."""
        new: list[Output] = []
        for output in batch:
            match output:
                case PromptLogprobs() if not self._has_prompt_logprobs:
                    self._has_prompt_logprobs = True
                    new.append(output)
                case OutputToken() if output.index in self._token_ids:
                    if self._request.continuation_ids:
                        self._num_scored += 1
                    else:
                        self._token_ids[output.index].append(output.token_id)
                    new.append(output)
                case ChildEnd() if output.index in self._token_ids:
                    del self._token_ids[output.index]
                    new.append(output)
        return new

    def _resume(self) -> None:
        """Go on after a preemption: no fault of anybody's, so it is no retry, and the same worker may be chosen again."""
        self.report.num_preemptions += 1
        PREEMPTED.inc()
        num_tokens = sum(map(len, self._token_ids.values()))
        log_event(_log, logging.INFO, "preempted", num_preemptions=self.report.num_preemptions, completion_tokens=num_tokens)

    def _retry(self, error: ShoalError, *, handed_over: bool) -> None:
        report = self.report
        report.num_retries += 1
        report.num_handovers += handed_over
        reason = "drain" if handed_over else "capacity" if isinstance(error, CapacityExceeded) else "unavailable"
        RETRIES.labels(reason).inc()
        how = "handed over" if handed_over else "started anew"
        if num_tokens := sum(map(len, self._token_ids.values())):
            RESUMED.inc()
            how = f"{'handed over' if handed_over else 'resumed'} after {num_tokens} tokens"
        report.notices.append(f"{how} on another attempt: {error}")
        log_event(_log, logging.WARNING, f"retry: {how}", num_retries=report.num_retries, error=loggable(error))

    def _lost_ends(self) -> list[ChildEnd]:
        """Ends of children whose last token was already their answer's end, and only the final message was lost."""
        sampling, ends = self._request.sampling, []
        for index, token_ids in list(self._token_ids.items()):
            if token_ids and token_ids[-1] in sampling.stop_token_ids:
                ends.append(ChildEnd(index, FinishReason.STOP, token_ids[-1]))
            elif len(token_ids) >= sampling.max_tokens or self._num_scored == len(self._request.continuation_ids) > 0:
                ends.append(ChildEnd(index, FinishReason.LENGTH))
            else:
                continue
            del self._token_ids[index]
        if ends:
            self._declare("the decode worker failed after the last token; its figures are computed, not counted", "lost end")
        return ends

    def _declare(self, notice: str, where: str) -> None:
        """A departure from what was asked: in the response, the metric and the log."""
        self.report.notices.append(notice)
        FALLBACKS.labels(where).inc()
        log_event(_log, logging.WARNING, "fallback", notice=notice)
