"""Asks: sends the plan's requests through Shoal's own client, when their time has come, and notes what each caller hears."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

from shoal.client.aio import AsyncClient
from shoal.client.connection import Retry
from shoal.client.requests import Sampling
from shoal.client.types import Chunk, Completion
from shoal.errors import ShoalError
from tests.chaos.outcome import Heard, Outcome
from tests.chaos.plan import Ask, Departure, Leave, Plan, Question

PATIENCE_S = 60.0  # the deadline of a request whose caller stays: one that needs so long hangs


class Driver:
    """One run's callers. `outcomes` fills up as they end."""

    def __init__(self, address: str, plan: Plan, label: str, max_open: int) -> None:
        self._client = AsyncClient(address, retry=Retry())
        self._plan = plan
        self._max_open = max_open
        self._label = label  # makes the ids of this run its own
        self.outcomes: list[Outcome] = []
        self.num_open = 0

    async def run(self, ended: Callable[[Outcome], None], stop: asyncio.Event) -> None:
        """Ask everything, or until `stop`; returns when every caller has ended."""
        started = time.monotonic()
        open_slots = asyncio.Semaphore(self._max_open)
        async with asyncio.TaskGroup() as callers:
            for ask in self._plan.asks:
                await asyncio.sleep(max(0.0, started + ask.at_s - time.monotonic()))
                await open_slots.acquire()
                if stop.is_set():
                    break
                caller = callers.create_task(self._call(ask))
                self.num_open += 1

                def done(task: asyncio.Task[Outcome]) -> None:
                    open_slots.release()
                    self.num_open -= 1
                    if not task.cancelled() and task.exception() is None:
                        self.outcomes.append(task.result())
                        ended(task.result())

                caller.add_done_callback(done)

    async def close(self) -> None:
        await self._client.close()

    async def _call(self, ask: Ask) -> Outcome:
        question, departure = self._plan.questions[ask.question], ask.departure
        outcome = Outcome(ask.index, ask.question, departure.how if departure else None, time.monotonic())
        request_id = f"{self._label}-{ask.index}"
        reading = asyncio.create_task(self._read(question, request_id, departure, outcome))
        leaving = asyncio.create_task(self._leave(departure, request_id, reading, outcome))
        await asyncio.wait({reading})
        leaving.cancel()
        await asyncio.wait({leaving})
        outcome.ended_s = time.monotonic()
        if not reading.cancelled() and (error := reading.exception()) is not None:
            if not isinstance(error, ShoalError):
                raise error
            outcome.error, outcome.words = type(error).__name__, str(error)[:300]
        return outcome

    async def _read(self, question: Question, request_id: str, departure: Departure | None, outcome: Outcome) -> None:
        too_short = departure is not None and departure.how is Leave.DEADLINE
        timeout_s = departure.after_s if departure is not None and too_short else PATIENCE_S
        last = time.monotonic()
        num_tokens = 0
        options = _sampling(question)
        events = self._client.generate(
            token_ids=question.prompt_ids, visibility=question.visibility, sampling=options,
            request_id=request_id, timeout_s=timeout_s,
        )  # fmt: skip
        async with aclosing(events):
            async for event in events:
                now = time.monotonic()
                outcome.longest_gap_s, last = max(outcome.longest_gap_s, now - last), now
                heard = outcome.heard.setdefault(event.index, Heard())
                match event:
                    case Chunk():
                        heard.streamed += event.token_ids
                        heard.logprobs += [token.logprob for token in event.logprobs]
                        num_tokens += len(event.token_ids)
                    case Completion():
                        heard.final, heard.reason = event.token_ids, str(event.finish_reason)
                        outcome.num_retries, outcome.num_notices = event.num_retries, len(event.notices)
                by_tokens = departure is not None and departure.how is Leave.TOKENS
                if departure is not None and by_tokens and num_tokens >= departure.after_tokens and not outcome.whole:
                    outcome.closed = True
                    return

    async def _leave(self, departure: Departure | None, request_id: str, reading: "asyncio.Task[None]", outcome: Outcome) -> None:
        if departure is None or departure.how not in (Leave.TIME, Leave.ABORT):
            return
        await asyncio.sleep(departure.after_s)
        if departure.how is Leave.TIME:
            outcome.closed = reading.cancel()
            return
        try:
            await self._client.abort(request_id)
            await self._client.abort(request_id)  # twice, and perhaps unknown: harmless
        except ShoalError as error:
            outcome.words = f"abort: {type(error).__name__}"


def _sampling(question: Question) -> Sampling:
    return Sampling(
        max_tokens=question.max_tokens,
        temperature=question.temperature,
        seed=question.seed,
        n=question.n if question.n > 1 else None,
        logprobs=0 if question.logprobs else None,
        ignore_eos=question.ignore_eos,
    )
