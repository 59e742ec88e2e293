"""A prefill worker with less room than the decode workers that reserve: waiting for its blocks is not a broken transfer."""

import dataclasses
import time
from pathlib import Path

import pytest

from shoal.config.worker import Pool
from tests.e2e.harness import TRANSFER, Ask, generate_all, in_process, make_config

pytestmark = pytest.mark.e2e


async def test_a_task_may_wait_for_room_longer_than_the_lease(tiny_model: Path) -> None:
    transfer = dataclasses.replace(TRANSFER, lease_s=0.4)
    prefill = make_config(Pool.PREFILL, tiny_model, transfer=transfer, max_running_requests=1)
    decode = make_config(Pool.DECODE, tiny_model, transfer=transfer)
    asks = [Ask(tuple(range(3, 43)), visibility, 3) for visibility in ("full", "speed:2", "pop:1:late")] * 2
    async with in_process(prefill, decode, layer_done=lambda layer: time.sleep(0.1)) as (_, _, p, d):
        answers = await generate_all(asks, p, d)
    assert [answer.token_ids for answer in answers[:3]] == [answer.token_ids for answer in answers[3:]]
