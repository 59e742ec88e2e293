"""A prefill worker with less room than the decode workers that reserve: waiting for its blocks is not a broken transfer."""

import asyncio
import dataclasses
import threading
import time
from pathlib import Path

import pytest

from shoal.config.worker import Pool
from tests.e2e.harness import TRANSFER, Ask, generate, generate_all, in_process, make_config
from tests.fakes.workers import until

pytestmark = pytest.mark.e2e


async def test_a_task_may_wait_for_room_longer_than_the_lease(tiny_model: Path) -> None:
    transfer = dataclasses.replace(TRANSFER, lease_s=0.4)
    prefill = make_config(Pool.PREFILL, tiny_model, transfer=transfer, max_running_requests=1)
    decode = make_config(Pool.DECODE, tiny_model, transfer=transfer)
    asks = [Ask(tuple(range(3, 43)), visibility, 3) for visibility in ("full", "speed:2", "pop:1:late")] * 2
    async with in_process(prefill, decode, layer_done=lambda layer: time.sleep(0.1)) as (_, _, p, d):
        answers = await generate_all(asks, p, d)
    assert [answer.token_ids for answer in answers[:3]] == [answer.token_ids for answer in answers[3:]]


async def test_short_prompts_that_wait_share_the_next_step(tiny_model: Path) -> None:
    """Six of 9 prefill tokens fit a step of 64: with the one they waited for, two steps run."""
    may_go_on, steps = threading.Event(), list[int]()

    def layer_done(layer: int) -> None:
        if layer == 0:
            steps.append(layer)
            may_go_on.wait(20)

    prefill, decode = make_config(Pool.PREFILL, tiny_model), make_config(Pool.DECODE, tiny_model)
    asks = [Ask(tuple(range(first, first + 10)), "speed:2", 2) for first in range(3, 73, 10)]
    async with in_process(prefill, decode, layer_done=layer_done) as (worker, _, p, d):
        answers = [asyncio.create_task(generate(asks[0], p, d))]
        await until(lambda: bool(steps), timeout_s=20)
        answers += [asyncio.create_task(generate(ask, p, d)) for ask in asks[1:]]
        await until(lambda: worker.load().num_running_reqs == len(asks), timeout_s=20)
        may_go_on.set()
        await asyncio.gather(*answers)
    assert len(steps) == 2
