"""One request from admission to its last delta: runs the dispatch, gathers tokens, keeps time. Knows no public proto."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from shoal.errors import Cancelled, InternalError
from shoal.router.admission import Admitted
from shoal.router.attempt import AttemptReport
from shoal.router.dispatch import Dispatch, DispatchReport
from shoal.router.instruments import GENERATED_TOKENS, ITL, TTFT
from shoal.router.output import Answer, ChildEnd, Delta, Output, OutputToken, PromptLogprobs
from shoal.router.token_queue import TokenQueue
from shoal.types import FinishReason


@dataclass(slots=True)
class Moments:
    """When things happened, by the event loop's clock, in seconds."""

    arrived: float
    tokenized: float
    first_token: float | None = None
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)  # first and last token of each child


class Generation:
    """`deltas` runs the request; `answers`, `report` and `moments` say the rest once it is through."""

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
        num_children = admitted.dispatch.num_children
        self.answers = [Answer(decode_text, sampling, index) for index in range(num_children)]
        self.prompt_logprobs: PromptLogprobs | None = None
        self.moments = Moments(arrived=arrived, tokenized=time.monotonic())
        self._dispatch = dispatch
        self._queue: TokenQueue[Output] = TokenQueue(max_queued_tokens)
        self._flush_s, self._flush_tokens = flush_s, min(flush_tokens * num_children, max_queued_tokens)
        self._has_shown_prompt = False
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

    @property
    def _live(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.finish_reason is None]

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes; one that `ends` for each child. Leaving early (a cancelled call) ends both legs."""
        pump = asyncio.create_task(self._pump())
        try:
            while self._live:
                try:
                    outputs = await self._queue.take(self._flush_tokens, self._flush_s)
                except Cancelled:
                    if not self._aborted:
                        raise
                    for answer in self._live:
                        yield answer.finish(FinishReason.ABORT)
                    return
                if not outputs:
                    raise InternalError("the dispatch ended without a reason")
                for delta in self._sort(outputs):
                    if delta.ends:
                        await self._dispatch.settle()  # a stop string: decode does not know of it
                    if delta.tokens and not self._has_shown_prompt:
                        delta.prompt_logprobs, self._has_shown_prompt = self.prompt_logprobs, True
                    yield delta
        finally:
            if not pump.done():
                pump.cancel()
                await asyncio.wait({pump})

    def _sort(self, outputs: list[Output]) -> Iterator[Delta]:
        """One delta for each child that has something new."""
        tokens: dict[int, list[OutputToken]] = {}
        ends: dict[int, ChildEnd] = {}
        for output in outputs:
            match output:
                case OutputToken():
                    tokens.setdefault(output.index, []).append(output)
                case ChildEnd():
                    ends[output.index] = output
                case PromptLogprobs():
                    self.prompt_logprobs = output
        for index in tokens | ends:
            answer = self.answers[index]
            if answer.finish_reason is not None:
                continue
            delta = answer.push(tokens.get(index, ()))
            if delta.ends:
                self._dispatch.end_child(index)
            elif (end := ends.get(index)) is not None:
                rest = answer.finish(end.reason, end.matched_token_id)
                delta.text, delta.ends = delta.text + rest.text, True
            if delta or delta.ends:
                yield delta

    async def _pump(self) -> None:
        try:
            async with aclosing(self._dispatch.outputs()) as batches:
                async for batch in batches:
                    is_first = self.moments.first_token is None
                    self._account([output for output in batch if isinstance(output, OutputToken)])
                    for output in batch:
                        await self._queue.put(output)
                    if is_first:
                        await asyncio.sleep(0)  # the reader goes before whatever else has come
        except Exception as error:  # noqa: BLE001  # whatever it is, the consumer raises it
            self._queue.end(error)
        else:
            self._queue.end()

    def _account(self, tokens: list[OutputToken]) -> None:
        """Note when tokens of one child came."""
        if not tokens:
            return
        now, moments, policy, index = time.monotonic(), self.moments, self.admitted.policy, tokens[0].index
        GENERATED_TOKENS.inc(len(tokens))
        if moments.first_token is None:
            moments.first_token, self._first_attempt = now, self.report.attempt
            TTFT.labels(policy).observe(now - moments.arrived)
        first, last = moments.spans.get(index, (now, None))
        if last is not None:
            ITL.labels(policy).observe(now - last)
        moments.spans[index] = first, now
