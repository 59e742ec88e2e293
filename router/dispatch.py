"""Chooses workers for a request and tries again, within bounds, when they fail. Knows no client and no text.

A failed request starts anew on other workers; tokens it has already produced are replayed there as decode tokens, so the
stream goes on without loss or repeat. Every retry is a metric, a log line and a notice in the response.
"""

import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from shoal.errors import CapacityExceeded, ShoalError, Unavailable
from shoal.placement.balance import choose_pair
from shoal.placement.cost import request_cost
from shoal.router.attempt import Attempt, AttemptReport, DispatchRequest
from shoal.router.instruments import RESUMED, RETRIES
from shoal.router.output import OutputToken
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
    notices: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_token_id: int | None = None


class Dispatcher:
    """Runs requests over the registry's workers."""

    def __init__(self, registry: Registry, shape: ModelShape, *, max_retries: int, rng: random.Random | None = None) -> None:
        self._registry = registry
        self._shape = shape
        self._max_retries = max_retries
        self._rng = rng or random.Random()

    def start(self, request: DispatchRequest) -> "Dispatch":
        """Prepare to run a request; nothing is sent before its tokens are asked for."""
        return Dispatch(self, request)

    def choose(
        self, request: DispatchRequest, failed: set[tuple[str, int]], full: set[tuple[str, int]]
    ) -> tuple[Worker, Worker | None]:
        """A decode worker and, when there are prefill tokens, a prefill worker. Raises Unavailable with words.

        Workers that failed this request, or do not answer, are chosen only when there is nobody else; full ones never.
        """
        pools = {pool: {w.worker_id: w for w in self._registry.pool(pool) if w.key not in full} for pool in (PREFILL, DECODE)}
        silent = {w.key for workers in pools.values() for w in workers.values() if not w.answers}
        decoders = {worker.key for worker in pools[DECODE].values()}
        for avoided in (failed | silent, failed, failed - decoders, failed & decoders, set()):
            excluded = frozenset(w.worker_id for workers in pools.values() for w in workers.values() if w.key in avoided)
            try:
                pair = choose_pair(
                    [worker.view for worker in pools[DECODE].values()],
                    [worker.view for worker in pools[PREFILL].values()],
                    request.visibility,
                    self._rng,
                    needs_prefill=request.num_prefill_tokens > 0,
                    excluded=excluded,
                )
            except Unavailable as error:
                reason = error
                continue
            prefill = None if pair.prefill is None else pools[PREFILL][pair.prefill.worker_id]
            return pools[DECODE][pair.decode.worker_id], prefill
        raise reason

    def attempt(self, request: DispatchRequest, replay_ids: tuple[int, ...], workers: tuple[Worker, Worker | None]) -> Attempt:
        num_tokens = min(request.sampling.max_tokens, _EXPECTED_TOKENS)
        cost = request_cost(self._shape, request.visibility, len(request.prompt_ids), num_tokens)
        return Attempt(request, replay_ids, *workers, cost)

    def may_retry(self, report: DispatchReport) -> bool:
        return report.num_retries < self._max_retries


class Dispatch:
    """One request on its way, over as many attempts as it takes."""

    def __init__(self, dispatcher: Dispatcher, request: DispatchRequest) -> None:
        self.report = DispatchReport()
        self._dispatcher = dispatcher
        self._request = request
        self._attempt: Attempt | None = None
        self._token_ids: list[int] = []

    async def tokens(self) -> AsyncGenerator[list[OutputToken], None]:
        """Sampled tokens, each once. Sets the report's finish reason; raises what no retry could mend."""
        failed: set[tuple[str, int]] = set()
        full: set[tuple[str, int]] = set()
        error: ShoalError | None = None
        while True:
            try:
                workers = self._dispatcher.choose(self._request, failed, full)
            except Unavailable as nobody:
                raise error or nobody from None
            self._attempt = self._dispatcher.attempt(self._request, tuple(self._token_ids), workers)
            self.report.attempt = self._attempt.report
            try:
                async with aclosing(self._attempt.tokens()) as batches:
                    async for batch in batches:
                        self._token_ids += [token.token_id for token in batch]
                        yield batch
            except (Unavailable, CapacityExceeded) as failure:
                error = failure
                if self._is_complete():
                    return
                if not self._dispatcher.may_retry(self.report):
                    raise
                blamed = self._attempt.report.failed
                (full if isinstance(failure, CapacityExceeded) else failed).update(blamed)
                self._retry(failure)
                continue
            finished = self._attempt.report.finished
            if finished is not None:
                self.report.finish_reason = FinishReason(finished.finish_reason)
                if finished.HasField("matched_token_id"):
                    self.report.matched_token_id = finished.matched_token_id
            return

    async def settle(self) -> None:
        """Let the prefill leg's figures arrive, when the answer ends before decode says so."""
        if self._attempt is not None:
            await self._attempt.settle()

    def _retry(self, error: ShoalError) -> None:
        report = self.report
        report.num_retries += 1
        reason = "capacity" if isinstance(error, CapacityExceeded) else "unavailable"
        RETRIES.labels(reason).inc()
        how = "started anew"
        if self._token_ids:
            RESUMED.inc()
            how = f"resumed after {len(self._token_ids)} tokens"
        report.notices.append(f"{how} on another attempt: {error}")
        _log.warning("request %r %s: %s", self._request.request_id, how, error)

    def _is_complete(self) -> bool:
        """Whether the last token was already the answer's end, and only the final message was lost."""
        sampling = self._request.sampling
        if self._token_ids and self._token_ids[-1] in sampling.stop_token_ids:
            self.report.finish_reason, self.report.matched_token_id = FinishReason.STOP, self._token_ids[-1]
        elif len(self._token_ids) >= sampling.max_tokens:
            self.report.finish_reason = FinishReason.LENGTH
        else:
            return False
        self.report.notices.append("the decode worker failed after the last token; its figures are computed, not counted")
        return True
