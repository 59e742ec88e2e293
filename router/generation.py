"""One request from admission to its last delta: runs the dispatch, gathers tokens, keeps time. Knows no public proto."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from shoal.errors import Cancelled, InternalError
from shoal.router.admission import Admitted
from shoal.router.attempt import AttemptReport
from shoal.router.dispatch import Dispatch, DispatchReport
from shoal.router.instruments import GENERATED_TOKENS, ITL, TTFT
from shoal.router.output import Answer, Delta, OutputToken
from shoal.router.token_queue import TokenQueue
from shoal.types import FinishReason


@dataclass(slots=True)
class Moments:
    """When things happened, by the event loop's clock, in seconds."""

    arrived: float
    tokenized: float
    first_token: float | None = None
    last_token: float | None = None


class Generation:
    """`deltas` runs the request; `answer`, `report` and `moments` say the rest once it is through."""

    def __init__(
        self,
        admitted: Admitted,
        dispatch: Dispatch,
        decode_text: Callable[[Sequence[int]], str],
        *,
        arrived: float,
        flush_s: float,
        flush_tokens: int,
        max_queued_tokens: int,
    ) -> None:
        sampling = admitted.dispatch.sampling
        self.admitted = admitted
        self.answer = Answer(decode_text, sampling.stop, sampling.stop_token_ids)
        self.moments = Moments(arrived=arrived, tokenized=time.monotonic())
        self._dispatch = dispatch
        self._queue: TokenQueue[OutputToken] = TokenQueue(max_queued_tokens)
        self._flush_s, self._flush_tokens = flush_s, flush_tokens
        self._aborted = False
        self._first_attempt: AttemptReport | None = None

    @property
    def first_attempt(self) -> AttemptReport:
        """The attempt that gave the first token, or the latest one before there is any: TTFT's parts are its."""
        return self._first_attempt or self.report.attempt

    @property
    def report(self) -> DispatchReport:
        return self._dispatch.report

    def abort(self) -> None:
        """End the answer now, with what it has."""
        self._aborted = True
        self._queue.end_now(Cancelled("the request was aborted"))

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes. Leaving early (a cancelled call) ends both legs."""
        pump = asyncio.create_task(self._pump())
        try:
            while self.answer.finish_reason is None:
                try:
                    tokens = await self._queue.take(self._flush_tokens, self._flush_s)
                except Cancelled:
                    if not self._aborted:
                        raise
                    delta = self.answer.finish(FinishReason.ABORT)
                else:
                    if tokens:
                        delta = self.answer.push(tokens)
                        if self.answer.finish_reason is not None:  # a stop string: decode does not know of it
                            await self._dispatch.settle()
                    elif (reason := self.report.finish_reason) is not None:
                        delta = self.answer.finish(reason, self.report.matched_token_id)
                    else:
                        raise InternalError("the dispatch ended without a reason")
                if delta:
                    yield delta
        finally:
            pump.cancel()
            await asyncio.wait({pump})

    async def _pump(self) -> None:
        try:
            async with aclosing(self._dispatch.tokens()) as batches:
                async for batch in batches:
                    self._account(len(batch))
                    for token in batch:
                        await self._queue.put(token)
        except Exception as error:  # noqa: BLE001  # whatever it is, the consumer raises it
            self._queue.end(error)
        else:
            self._queue.end()

    def _account(self, num_tokens: int) -> None:
        now, moments, policy = time.monotonic(), self.moments, self.admitted.policy
        GENERATED_TOKENS.inc(num_tokens)
        if moments.first_token is None:
            moments.first_token, self._first_attempt = now, self.report.attempt
            TTFT.labels(policy).observe(now - moments.arrived)
        elif moments.last_token is not None:
            ITL.labels(policy).observe(now - moments.last_token)
        moments.last_token = now
