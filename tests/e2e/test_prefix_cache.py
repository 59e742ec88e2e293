"""Answers with a prefix cache are those without, token for token, whatever was held, where, and by whom it was made."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.config.worker import Pool, WorkerConfig
from shoal.decode_worker import metrics
from shoal.model_files import open_model, write_random_model
from shoal.types import ModelShape
from shoal.visibility import Visibility
from tests.e2e.harness import Answer, Ask, Endpoint, generate, generate_all, in_process, make_config
from tests.e2e.test_workers import assert_equal, local_results

KINDS = ("full", "speed:2", "speed:3:anchors=12", "speed:1:anchors=0", "pop:2", "pop:1:late")
BOUNDARIES = (1, 3, 9)


def config(pool: Pool, model: Path, worker_id: str = "", **changes: Any) -> WorkerConfig:
    allowed = tuple(Visibility.parse(kind) for kind in KINDS)
    return make_config(pool, model, worker_id, allowed_visibilities=allowed, **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shape(model: Path) -> ModelShape:
    return open_model(str(model)).config.shape


def begin_alike(kind: str, seed: int, count: int = 6) -> list[Ask]:
    """Prompts that share a beginning of some length with one another, at different boundaries."""
    rng = random.Random(f"{kind}{seed}")
    base = [rng.randrange(512) for _ in range(90)]
    asks = []
    for index in range(count):
        own = [rng.randrange(512) for _ in range(rng.choice([0, 1, 7, 20]))]
        prompt = tuple(base[: rng.choice([24, 40, 47, 80])] + own)
        boundary = BOUNDARIES[index % 3]
        temperature = 0.8 if index % 2 else 0.0
        asks.append(Ask(prompt, f"{kind}:boundary={boundary}", 4 + index, temperature=temperature, seed=index))
    return asks


async def test_a_cache_that_fails_costs_no_blocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be kept is given back all the same, on either worker, and the next request does not notice."""

    def fail(*_: object) -> None:
        raise RuntimeError("no room in the index")

    asks = begin_alike("speed:2", 3, 2)
    async with in_process(*(config(pool, model) for pool in Pool)) as (_, _, p, d):
        expected = await in_turn(asks, p, d)
    monkeypatch.setattr("shoal.prefill_worker.prefixes.PrefillPrefixes.publish", fail)
    monkeypatch.setattr("shoal.decode_worker.prefixes.DecodePrefixes.publish", fail)
    async with in_process(*(config(pool, model) for pool in Pool)) as (_, _, p, d):
        assert [answer.token_ids for answer in await in_turn(asks, p, d)] == [answer.token_ids for answer in expected]
        for end, pool in ((p, Pool.PREFILL), (d, Pool.DECODE)):
            load = await end.idle(pool)
            assert (load.num_used_blocks, load.num_cached_blocks) == (0, 0)


def next_turn(ask: Ask, answer: Answer, seed: int) -> Ask:
    """The conversation goes on: what was generated is prompt now."""
    rng = random.Random(seed)
    more = tuple(rng.randrange(512) for _ in range(11))
    return Ask((*ask.prompt_ids, *answer.token_ids, *more), ask.visibility, 5, seed=seed)


async def in_turn(asks: Sequence[Ask], prefill: Endpoint, decode: Endpoint) -> list[Answer]:
    return [await generate(ask, prefill, decode) for ask in asks]


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_are_those_without_a_cache(model: Path, shape: ModelShape, kind: str) -> None:
    asks = begin_alike(kind, 0)
    prefill, decode = (config(pool, model, token_budget=29) for pool in Pool)
    async with in_process(prefill, decode) as (_, _, p, d):
        first = await in_turn(asks, p, d)
        turns = [next_turn(ask, answer, seed) for seed, (ask, answer) in enumerate(zip(asks, first, strict=True))]
        second = await generate_all(turns + asks, p, d)
        load = await d.idle(Pool.DECODE)
    assert_equal([*asks, *turns, *asks], [*first, *second], local_results(model, [*asks, *turns, *asks]), shape)
    cached = [answer.reserved.cached_tokens for answer in (*first, *second)]
    assert cached[0] == 0 and sum(cached[:6]) > 60 and all(number >= 8 for number in cached[6:]), cached
    assert load.num_cached_blocks > 0 and load.num_used_blocks == 0
    if not kind.startswith("pop"):  # generated tokens serve too, but never as `pop`'s upper KV
        whole = [len(ask.prompt_ids) + len(answer.token_ids) - 1 for ask, answer in zip(asks, first, strict=True)]
        assert cached[6:12] == [num_tokens // 8 * 8 for num_tokens in whole]


@pytest.mark.parametrize("kind", ["full", "speed:1:anchors=0", "speed:2", "pop:2", "pop:1:late"])
async def test_window_layers_hold_no_more_than_is_seen(tmp_path: Path, kind: str) -> None:
    """Blocks go back as windows pass over them; what the cache keeps of a sequence serves the next turn, and no token differs."""
    model = write_random_model(tmp_path, architecture="gemma2", sliding_window=9)
    shape = open_model(str(model)).config.shape
    asks = begin_alike(kind, 2)
    prefill, decode = (config(pool, model, token_budget=29) for pool in Pool)
    dropped, evicted = metrics.HIDDEN_BLOCKS, metrics.EVICTED_BLOCKS
    before = dropped._value.get(), evicted._value.get()
    async with in_process(prefill, decode) as (_, _, p, d):
        first = await in_turn(asks, p, d)
        turns = [next_turn(ask, answer, seed) for seed, (ask, answer) in enumerate(zip(asks, first, strict=True))]
        second = await generate_all(turns + asks, p, d)
        load = await d.idle(Pool.DECODE)
    assert_equal([*asks, *turns, *asks], [*first, *second], local_results(model, [*asks, *turns, *asks]), shape)
    assert load.num_used_blocks == 0 and load.num_cached_blocks > 0
    assert dropped._value.get() > before[0] and evicted._value.get() == before[1]
    assert kind.startswith("pop") or any(answer.reserved.cached_tokens for answer in second)


async def test_a_prompt_that_is_held_whole_calls_no_prefill(model: Path, shape: ModelShape) -> None:
    rng = random.Random(5)
    prompt = tuple(rng.randrange(512) for _ in range(44))
    asks = [Ask(prompt, f"{kind}:boundary={b}", 4) for kind in KINDS for b in (1, 4, 6)]
    async with in_process(*(config(pool, model) for pool in Pool)) as (_, _, p, d):
        answers = await in_turn(asks, p, d)
    assert_equal(asks, answers, local_results(model, asks), shape)
    # 44 tokens are five whole blocks: 43 and then 40 and 38 prefill tokens, of which none is left to run
    held = [answer.reserved.cached_tokens for answer in answers]
    assert held == [0, 40, 38] * len(KINDS), held
    assert [answer.prefill is None for answer in answers][:3] == [False, True, True]


async def test_salts_share_nothing(model: Path) -> None:
    prompt = tuple(range(60))
    async with in_process(*(config(pool, model) for pool in Pool)) as (_, _, p, d):
        answers = await in_turn([Ask(prompt, "full", cache_salt=salt) for salt in ("", "a", "b", "a", "")], p, d)
    assert [answer.reserved.cached_tokens for answer in answers] == [0, 0, 0, 56, 56]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_prefill_runs_only_what_it_does_not_hold(model: Path, shape: ModelShape, kind: str) -> None:
    asks = begin_alike(kind, 1)
    prefill = config(Pool.PREFILL, model, token_budget=23)
    async with in_process(prefill, config(Pool.DECODE, model, prefix_cache=False)) as (_, _, p, d):
        answers = await in_turn(asks, p, d) + await generate_all(asks, p, d)
        load = await p.idle(Pool.PREFILL)
    assert_equal(asks * 2, answers, local_results(model, asks * 2), shape)
    assert all(answer.reserved.cached_tokens == 0 for answer in answers)
    cached = [answer.prefill.cached_tokens if answer.prefill is not None else 0 for answer in answers]
    if kind.endswith("late"):  # every token's state is due, and none was kept
        assert sum(cached) == 0
    else:
        assert cached[0] == 0 and sum(cached[:6]) > 60 and min(cached[6:]) >= 8, cached
    assert load.num_cached_blocks > 0


async def test_both_sides_hold_different_parts(model: Path, shape: ModelShape) -> None:
    rng = random.Random(9)
    base = tuple(rng.randrange(512) for _ in range(80))
    asks = [Ask(base[:n], kind, 3) for kind in KINDS for n in (30, 80, 60)]
    async with in_process(*(config(pool, model) for pool in Pool)) as (_, _, p, d):
        first = await in_turn(asks[::3], p, d)  # both hold what it begins with
        async with in_process(config(Pool.PREFILL, model, "other"), config(Pool.DECODE, model, "d2")) as (_, _, _, d2):
            await in_turn(asks[1::3], p, d2)  # prefill holds more than the first decode worker does
            second = await in_turn(asks[2::3], p, d)
    answers = [*first, *second]
    assert_equal(asks[::3] + asks[2::3], answers, local_results(model, asks[::3] + asks[2::3]), shape)
    sides = [(answer.reserved.cached_tokens, answer.prefill.cached_tokens) for answer in second if answer.prefill is not None]
    assert sides == [(24, 56)] * 5 + [(24, 24)], sides


async def test_nothing_is_kept_of_what_was_not_finished(model: Path, shape: ModelShape) -> None:
    """Callers leave before, during and after the transfer; what is kept by then serves the rest right."""
    rng = random.Random(3)
    asks = [ask for seed in range(4) for kind in KINDS for ask in begin_alike(kind, seed, 2)]
    kept: list[tuple[Ask, Answer]] = []
    pools = (config(pool, model, num_blocks=260, token_budget=16, max_running_requests=6) for pool in Pool)
    async with in_process(*pools) as (_, _, p, d):

        async def live(ask: Ask) -> None:
            await asyncio.sleep(rng.random() * 0.3)
            running = asyncio.create_task(generate(ask, p, d))
            done, _ = await asyncio.wait((running,), timeout=rng.choice([0.01, 0.03, 0.08, 30, 30]))
            running.cancel()
            if done:
                kept.append((ask, running.result()))
            await asyncio.wait((running,))

        await asyncio.gather(*(live(ask) for ask in asks))
        last = await generate_all(asks[:12], p, d)
    asks, answers = [ask for ask, _ in kept] + asks[:12], [answer for _, answer in kept] + last
    assert_equal(asks, answers, local_results(model, asks), shape)
    assert 10 < len(kept) < 48 and sum(answer.reserved.cached_tokens for answer in answers) > 100
