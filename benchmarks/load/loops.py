"""Sends requests and keeps what came: closed loop (callers that wait for their answers) or open loop (each at its time)."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.load.asks import Ask
from shoal.errors import ShoalError
from shoal.rpc.status import to_status
from shoal.simulator.calibration.measure import Asks, ask
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's outcome as its caller saw it. Seconds; None where it never came to that."""

    visibility: str
    index: int
    sent_s: float  # since the run began
    late_s: float  # behind its time, in an open loop
    status: str  # OK, or gRPC's name of the error
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, held by decode
    uncomputed_tokens: int = 0  # of the prompt, held by either worker
    prefill_at: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    total_s: float = 0.0
    gaps_s: tuple[float, ...] = ()  # between messages with tokens


@dataclass(frozen=True, slots=True)
class Run:
    """All answers of a visibility, and how long they took from the first request to the last answer."""

    answers: tuple[Answer, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Caller:
    """Sends one request. Errors are outcomes."""

    client: Asks
    visibility: Visibility
    label: str
    prompts: Sequence[Sequence[int]]  # by request: drawn beforehand, for drawing takes time
    timeout_s: float
    told: Callable[[str], None]

    async def send(self, index: int, one: Ask, began_s: float, due_s: float | None) -> Answer:
        sent_s = time.perf_counter()
        late_s = sent_s - due_s if due_s is not None else 0.0
        base = Answer(self.label, index, sent_s - began_s, late_s, "OK", one.num_prompt_tokens)
        try:
            timeline = await ask(self.client, self.prompts[index], one.max_tokens, self.visibility, timeout_s=self.timeout_s)
        except ShoalError as error:
            self.told(self.label)
            return replace(base, status=to_status(error).name, total_s=time.perf_counter() - sent_s)
        self.told(self.label)
        done, moments = timeline.completion, timeline.moments
        assert done is not None
        num_tokens = moments[-1][1]
        return replace(
            base,
            output_tokens=num_tokens,
            cached_tokens=done.cached_tokens,
            uncomputed_tokens=max(done.cached_tokens, done.prefill_cached_tokens),
            prefill_at=done.transfer.prefill_at,
            ttft_s=timeline.first_s - timeline.begin_s,
            tpot_s=(timeline.last_s - timeline.first_s) / (num_tokens - 1) if num_tokens > 1 else None,
            total_s=time.perf_counter() - sent_s,
            gaps_s=tuple(later[0] - earlier[0] for earlier, later in itertools.pairwise(moments)),
        )


async def closed_loop(caller: Caller, asks: Iterable[Ask], num_callers: int, seconds: float | None) -> Run:
    """Each caller sends the next request when its last is answered; none is sent after so many seconds."""
    began_s, source, answers = time.perf_counter(), enumerate(asks), list[Answer]()

    async def go_on() -> None:
        for index, one in source:
            if seconds is not None and time.perf_counter() - began_s >= seconds:
                return
            answers.append(await caller.send(index, one, began_s, None))

    await asyncio.gather(*(go_on() for _ in range(num_callers)))
    return Run(tuple(answers), time.perf_counter() - began_s)


async def open_loop(caller: Caller, asks: Sequence[Ask]) -> Run:
    """Each request at its own time, whatever became of the ones before."""
    began_s = time.perf_counter()

    async def one_of(index: int, one: Ask) -> Answer:
        due_s = began_s + one.arrival_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        return await caller.send(index, one, began_s, due_s)

    answers = await asyncio.gather(*(one_of(index, one) for index, one in enumerate(asks)))
    return Run(tuple(answers), time.perf_counter() - began_s)
