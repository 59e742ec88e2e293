"""Times a running deployment through the public API: prompts alone, and steps of several requests together.

Prompts are random token ids, so that no cached prefix shortens them, and answers run to max_tokens. Knows the
client; fits nothing.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Unpack

from shoal.client import Chunk, Completion, Sampling
from shoal.client.requests import Options, Prompt
from shoal.errors import InternalError, InvalidConfig
from shoal.placement.cost import kv_layer_tokens_read
from shoal.simulator.calibration.points import CrowdPoint, DecodePoint, Measured, PrefillPoint, Sample
from shoal.simulator.model_spec import ModelSpec
from shoal.visibility import Visibility

_SLACK = 1.3  # how much longer than estimated the rows of a batch run until the last has joined
_WINDOW_S = 1.0  # steps are timed over at least so long: messages gather tokens for some milliseconds
_LEAST_OTHER_S = 1e-6

Told = Callable[[str, int, int], None]  # what is measured, how many are done, of how many


class Asks(Protocol):
    """What a client must offer: `shoal.client.AsyncClient` does."""

    def generate(
        self, prompt: Prompt | None = None, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk | Completion, None]: ...


@dataclass(frozen=True, slots=True)
class Programme:
    """What is measured. Prompt lengths in tokens."""

    visibilities: tuple[Visibility, ...]  # resolved
    lengths: tuple[int, ...] = (64, 256, 512, 1024, 2048)
    batches: tuple[int, ...] = (1, 4, 8)
    contexts: tuple[int, ...] = (128, 1024)
    repeats: int = 3
    num_steps: int = 48  # of each window of decode steps

    def __post_init__(self) -> None:
        if len(set(self.lengths)) < 2:
            raise InvalidConfig("measure prompts of at least two lengths: one cannot tell a rate from an overhead")
        if len(set(self.batches)) * len(set(self.contexts)) < 2:
            raise InvalidConfig("measure at least two batches or contexts: one cannot tell weight reads from KV reads")
        if not self.visibilities or self.repeats < 1 or self.num_steps < 8:
            raise InvalidConfig("measure at least one visibility, once, over at least 8 steps")
        for name in ("lengths", "batches", "contexts"):
            if min(getattr(self, name)) < (2 if name != "batches" else 1):
                raise InvalidConfig(f"{name} of {min(getattr(self, name))} make no sense")

    @property
    def num_points(self) -> int:
        decode = len(self.batches) * len(self.contexts)
        return len(self.visibilities) * len(self.lengths) + decode + 1


@dataclass(slots=True)
class Timeline:
    """When the tokens of one answer came: (seconds, tokens so far)."""

    begin_s: float
    moments: list[tuple[float, int]] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def first_s(self) -> float:
        return self.moments[0][0]

    @property
    def last_s(self) -> float:
        return self.moments[-1][0]


async def measure(
    client: Asks, model: ModelSpec, vocab_size: int, programme: Programme, *, token_budget: int, told: Told
) -> Measured:
    """All points of a programme, without the lengths that the server prefills on decode.

    Raises what the client raises, InvalidConfig when fewer than two lengths are left.
    """
    rng, done = random.Random(), 0  # other prompts each time: a server that was measured before has those cached
    told("warming up", 0, programme.num_points)
    for visibility in programme.visibilities:
        await ask(client, _prompt(rng, 32, vocab_size), 4, visibility)
    prefill: list[PrefillPoint] = []
    kept: list[int] = []
    skipped: list[int] = []
    for length in programme.lengths:
        told(f"prompts of {length:,} tokens", done, programme.num_points)
        taken: dict[Visibility, list[Timeline]] = {visibility: [] for visibility in programme.visibilities}
        for _ in range(programme.repeats):  # interleaved, so that a slow minute does not meet one visibility only
            for visibility in programme.visibilities:
                taken[visibility].append(await ask(client, _prompt(rng, length, vocab_size), 2, visibility))
            if any(_is_on_decode(each[-1]) for each in taken.values()):
                skipped.append(length)
                break
        else:
            prefill += [_prefill_point(visibility, length, timelines) for visibility, timelines in taken.items()]
            kept.append(length)
        done += len(taken)
    notes = _notes_on_skipped(skipped, kept)
    decode: list[DecodePoint] = []
    for context in programme.contexts:
        alone_s = _prefill_estimate(prefill, context)
        for batch in programme.batches:
            told(f"steps of {batch} × {context:,} tokens", done, programme.num_points)
            step_s = decode[-1].step.middle if decode else prefill[0].other.middle
            decode.append(await _decode_point(client, model, programme, batch, context, alone_s, step_s, rng, vocab_size))
            done += 1
    told("both pools at once", done, programme.num_points)
    ends = (min(kept), max(kept))
    crowd = tuple([await _crowd_point(client, programme, length, rng, vocab_size) for length in ends])
    told("measured", done + 1, done + 1)
    return Measured(model, tuple(prefill), tuple(decode), token_budget, crowd, notes)


async def ask(
    client: Asks, token_ids: Sequence[int], max_tokens: int, visibility: Visibility, *, timeout_s: float | None = None
) -> Timeline:
    """One greedy request that runs to max_tokens."""
    timeline = Timeline(time.perf_counter())
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    num_tokens = 0
    stream = client.generate(None, timeout_s=timeout_s, token_ids=token_ids, sampling=sampling, visibility=str(visibility))
    async for event in stream:
        now = time.perf_counter()
        if isinstance(event, Chunk):
            num_tokens += len(event.token_ids)
            if event.token_ids:
                timeline.moments.append((now, num_tokens))
        else:
            timeline.completion = event
    if timeline.completion is None or not timeline.moments:
        raise InternalError("the server ended an answer without its tokens or its last message")
    return timeline


def _is_on_decode(timeline: Timeline) -> bool:
    return timeline.completion is not None and timeline.completion.transfer.prefill_at == "decode_worker"


def _notes_on_skipped(skipped: Sequence[int], kept: Sequence[int]) -> tuple[str, ...]:
    """Which lengths say nothing of prefill, and what would change that. Raises InvalidConfig when too few are left."""
    if not skipped:
        return ()
    lengths = ", ".join(f"{length:,}" for length in skipped)
    words = (
        f"prompts of {lengths} tokens were prefilled on the decode worker and are left out; a server started with "
        "--local-prefill-tokens 0 measures them"
    )
    if len(set(kept)) < 2:
        raise InvalidConfig(f"{words}, or give at least two longer --lengths")
    return (words,)


def _prompt(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def _prefill_point(visibility: Visibility, length: int, timelines: Sequence[Timeline]) -> PrefillPoint:
    prefill, exposed, other = [], [], []
    for timeline in timelines:
        assert timeline.completion is not None
        timings = timeline.completion.timings
        prefill.append(timings.prefill_ms / 1e3)
        exposed.append(timings.transfer_ms / 1e3)
        seconds = timeline.first_s - timeline.begin_s - prefill[-1] - exposed[-1]
        other.append(max(_LEAST_OTHER_S, seconds))
    completion = timelines[0].completion
    assert completion is not None
    num_bytes = completion.transfer.payload_bytes
    return PrefillPoint(visibility, length, Sample(tuple(prefill)), Sample(tuple(exposed)), Sample(tuple(other)), num_bytes)


def _prefill_estimate(points: Sequence[PrefillPoint], length: int) -> float:
    """Seconds of a prompt, from the nearest length that was measured."""
    nearest = min(points, key=lambda point: abs(point.num_prompt_tokens - length))
    return nearest.prefill.middle * max(1.0, length / nearest.num_prompt_tokens)


async def _decode_point(
    client: Asks, model: ModelSpec, programme: Programme, batch: int, context: int, prompt_s: float, step_s: float,
    rng: random.Random, vocab_size: int,
) -> DecodePoint:  # fmt: skip
    """Steps while all rows of a batch run: they join one by one as their prompts are done."""
    visibility = programme.visibilities[0]
    num_joining = int(_SLACK * (batch - 1) * prompt_s / step_s)
    num_wanted = max(programme.num_steps, int(_WINDOW_S / step_s))
    max_tokens = min(num_joining + num_wanted, model.shape.max_context - context)
    seconds: list[float] = []
    for attempt in range(programme.repeats + 2):
        prompts = [_prompt(rng, context, vocab_size) for _ in range(batch)]
        timelines = await asyncio.gather(*(ask(client, prompt, max_tokens, visibility) for prompt in prompts))
        begin, end = max(timeline.first_s for timeline in timelines), min(timeline.last_s for timeline in timelines)
        found = [_steps_between(timeline, begin, end) for timeline in timelines]
        if min(count for count, _, _ in found) >= num_wanted / 2:
            seconds.append(sum((last - first) / count for count, first, last in found) / batch)
        else:
            max_tokens = min(2 * max_tokens, model.shape.max_context - context)
        if len(seconds) == programme.repeats or (seconds and attempt + 1 >= programme.repeats):
            break
    if not seconds:
        raise InternalError(f"{batch} requests of {context} tokens never ran together long enough to be timed")
    read = 0.0
    for timeline, (count, _, _) in zip(timelines, found, strict=True):
        before = next(tokens for at, tokens in timeline.moments if at >= begin)
        num_boundary = context - visibility.split(context).num_prefill_tokens
        read += kv_layer_tokens_read(model.shape, visibility, context, num_boundary + before + count // 2)
    return DecodePoint(visibility, batch, context, read, Sample(tuple(seconds)))


async def _crowd_point(client: Asks, programme: Programme, length: int, rng: random.Random, vocab_size: int) -> CrowdPoint:
    """Two requests step while prompts of one length are prefilled one after the other, and each of these alone."""
    visibility, context = programme.visibilities[0], programme.contexts[0]

    async def steps() -> list[float]:
        prompts = [_prompt(rng, context, vocab_size) for _ in range(2)]
        answers = await asyncio.gather(*(ask(client, prompt, programme.num_steps, visibility) for prompt in prompts))
        return [(each.last_s - each.first_s) / max(1, each.moments[-1][1] - 1) for each in answers]

    async def prefills(until: asyncio.Event | None) -> list[float]:
        taken: list[float] = []
        while not taken or (len(taken) < programme.repeats if until is None else not until.is_set()):
            completion = (await ask(client, _prompt(rng, length, vocab_size), 1, visibility)).completion
            assert completion is not None
            taken.append(completion.timings.prefill_ms / 1e3)
        return taken

    alone, prefill_alone, done = [await steps() for _ in range(programme.repeats)], await prefills(None), asyncio.Event()
    begin, feeding = time.perf_counter(), asyncio.create_task(prefills(done))
    try:
        beside = [await steps() for _ in range(programme.repeats)]
    finally:
        done.set()
    prefill_beside = await feeding
    interval_s = (time.perf_counter() - begin) / len(prefill_beside)
    samples = [[value for each in runs for value in each] for runs in (alone, beside)] + [prefill_alone, prefill_beside]
    return CrowdPoint(length, interval_s, *(Sample(tuple(values)) for values in samples))


def _steps_between(timeline: Timeline, begin: float, end: float) -> tuple[int, float, float]:
    """(Tokens, first and last moment) of an answer within [begin, end]. Gathered messages shift a moment by less than a flush."""
    inside = [moment for moment in timeline.moments if begin <= moment[0] <= end]
    if len(inside) < 2:
        return 0, begin, end
    (first, before), (last, after) = inside[0], inside[-1]
    return after - before, first, last
