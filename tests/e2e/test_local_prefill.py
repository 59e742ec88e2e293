"""A decode worker that prefills prompts itself gives the tokens of the split and of the single process, and ships nothing."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.config.worker import Pool
from shoal.decode_worker.worker import DecodeWorker
from shoal.engine.local import LocalRequest
from shoal.model_files import write_random_model
from shoal.placement.arithmetic import wire_bytes
from shoal.types import DType, SamplingParams
from shoal.visibility import Visibility
from tests.e2e import served as front
from tests.e2e.harness import Answer, Ask, Endpoint, generate, generate_all, in_process, make_config
from tests.e2e.test_workers import local_results, make_asks

EVERYTHING = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


def site(answer: Answer) -> tuple[str, str]:
    return answer.reserved.prefill_at, answer.reserved.prefill_reason


@pytest.mark.parametrize("budget", [512, 11, 1])
async def test_split_local_and_the_single_process_agree(model: Path, budget: int) -> None:
    """Every visibility, b > 1, prompts of one token and of many chunks; local and split requests in one batch."""
    asks = make_asks()
    results = local_results(model, asks)
    mixed = [replace(ask, local_below=EVERYTHING if index % 2 else 0) for index, ask in enumerate(asks)]
    local = [replace(ask, local_below=EVERYTHING) for ask in asks]
    decode = make_config(Pool.DECODE, model, prefix_cache=False, token_budget=budget)
    async with in_process(make_config(Pool.PREFILL, model, prefix_cache=False), decode) as (_, worker, *endpoints):
        answers = await generate_all([*mixed, *local], *endpoints)
        shape = worker.shape
    for ask, answer, result in zip([*mixed, *local], answers, results * 2, strict=True):
        assert tuple(answer.token_ids) == result.token_ids, ask
        visibility = Visibility.parse(ask.visibility).resolve(shape.num_layers)
        if not visibility.split(len(ask.prompt_ids)).num_prefill_tokens:
            assert site(answer) == ("", "nothing_to_run")
        elif ask.local_below:
            assert site(answer) == ("decode_worker", "short")
            assert answer.reserved.plan_bytes == answer.reserved.num_entries == answer.finished.received_payload_bytes == 0
            assert answer.finished.prefill_ms > 0
        else:
            assert site(answer) == ("prefill_worker", "long")
            assert answer.finished.received_payload_bytes == wire_bytes(shape, DType.FLOAT32, visibility, len(ask.prompt_ids))
            assert answer.finished.prefill_ms == 0


@pytest.mark.parametrize("text", ["full", "speed:3:anchors=4:boundary=5", "pop:1:late"])
async def test_a_colocated_worker_needs_no_other(model: Path, text: str) -> None:
    """n > 1, without a rule in the request and without any prefill worker; replayed tokens go on as if never interrupted."""
    ask = Ask(tuple(range(40)), text, max_tokens=8, temperature=0.9, seed=3, num_children=3)
    base = replace(ask, num_children=1)
    alone = [local_child(model, base, child) for child in range(3)]
    worker = DecodeWorker(make_config(Pool.DECODE, model, prefix_cache=False, colocated=True, token_budget=16))
    endpoint = Endpoint(await worker.start())
    try:
        assert worker.describe().colocated
        answer, resumed = await asyncio.gather(
            generate(ask, endpoint, endpoint), generate(replace(base, replay=alone[0][:3], max_tokens=5), endpoint, endpoint)
        )
        await endpoint.idle(Pool.DECODE)
    finally:
        await endpoint.close()
        await worker.stop()
    assert [tuple(answer.children[child]) for child in range(3)] == alone
    assert alone[0][:3] + tuple(resumed.token_ids) == alone[0]
    assert site(answer) == ("decode_worker", "colocated")


async def test_cancelled_while_prefilling_gives_everything_back(model: Path) -> None:
    config = make_config(Pool.DECODE, model, prefix_cache=False, colocated=True, token_budget=1)
    worker = DecodeWorker(config)
    endpoint = Endpoint(await worker.start())
    try:
        task = asyncio.create_task(generate(Ask(tuple(range(200)), "pop:2"), endpoint, endpoint))
        load = await endpoint.until(Pool.DECODE, lambda load: load.num_running_reqs == 1)
        assert 0 < load.outstanding_token_layers <= 199 * 2 + 6 * 4
        task.cancel()
        await asyncio.wait({task})
        await endpoint.idle(Pool.DECODE)
    finally:
        await endpoint.close()
        await worker.stop()


def local_child(model: Path, ask: Ask, child: int) -> tuple[int, ...]:
    [result] = local_results(model, [ask], child=child)
    return result.token_ids


async def test_served_short_prompts_run_on_decode_and_give_the_same_tokens(model: Path) -> None:
    """Through the router: the rule, and the fallback once no prefill worker is left."""
    prompts = [tuple(range(num_tokens)) for num_tokens in (1, 12, 60)]
    asked = [(prompt, text) for prompt in prompts for text in ("full", "speed:2", "pop:1:late")]
    expected = front.local(
        model, (LocalRequest(prompt, Visibility.parse(text), SamplingParams(6, ignore_eos=True)) for prompt, text in asked)
    )
    async with front.served(model, prefix_cache=False, router={"local_prefill_tokens": 20, "prefill_fallback": True}) as split:
        answers = [(await split.completes(front.ask(prompt, text)))[0] for prompt, text in asked]
        await split.prefill[0].stop()
        later = [(await split.completes(front.ask(prompt, text)))[0] for prompt, text in asked[6:]]
    assert [tuple(answer.output_ids) for answer in [*answers, *later]] == [r.token_ids for r in [*expected, *expected[6:]]]
    sites = [answer.transfer.prefill_at for answer in answers]
    assert sites == [""] * 3 + ["decode_worker"] * 3 + ["prefill_worker"] * 3
    assert [bool(answer.transfer.payload_bytes) for answer in answers] == [site == "prefill_worker" for site in sites]
    assert {answer.transfer.prefill_reason for answer in later} == {"no_prefill_worker"} and all(a.notices for a in later)
