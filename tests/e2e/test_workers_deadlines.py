"""A caller that leaves, or whose time runs out, at each stage of a request: both workers give everything back, others go on."""

import asyncio
import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.config.worker import Pool
from shoal.decode_worker import step_loop
from shoal.decode_worker.step import DecodeStep
from shoal.errors import DeadlineExceeded
from shoal.kv_transfer.faults import VARIABLE
from shoal.pb.v1 import shoal_pb2
from tests.e2e.harness import TRANSFER, Ask, ends_with, generate, in_process, make_config

ASK = Ask(tuple(range(3, 103)), "pop:2", max_tokens=6)
OTHER = Ask(tuple(range(40, 90)), "speed:2", max_tokens=3)
MANY_MESSAGES = dataclasses.replace(TRANSFER, max_entry_bytes=4096)  # entries share no more than that
DEADLINE_S = 1.5  # in which every stage is reached; at the stage the request stands still until it has ended for its caller


class Hold:
    """Stops a step thread at a point, once it is armed."""

    def __init__(self) -> None:
        self.armed, self.reached, self.released = threading.Event(), threading.Event(), threading.Event()

    def here(self, due: bool) -> None:
        if due and self.armed.is_set() and not self.reached.is_set():
            self.reached.set()
            self.released.wait(10)

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 10)


def num_answered(step: DecodeStep) -> int:
    return max((len(row.request.children[0].answer_ids) for row in step.rows), default=-1)


STEPS = {  # which step of decode it is that stands still
    "boundary step": lambda step: any(row.begins for row in step.rows),
    "decoding": lambda step: num_answered(step) == 3,
    "last token": lambda step: num_answered(step) == ASK.max_tokens - 1,
}


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("stage", ["queued", "queued for prefill", "prefilling", "mid-transfer", *STEPS])
async def test_whoever_leaves_when_frees_both_sides(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, stage: str, how: str
) -> None:
    hold = Hold()
    run_step = step_loop.run_step

    def held_step(step: DecodeStep, resident: Any) -> Any:
        hold.here(stage in STEPS and STEPS[stage](step))
        return run_step(step, resident)

    monkeypatch.setattr(step_loop, "run_step", held_step)
    if stage == "mid-transfer":
        fault = {"before-send": {"action": "delay", "delay_s": 2.0, "skip": 2}}
        monkeypatch.setenv(VARIABLE, json.dumps(fault))
    few = {"queued": Pool.DECODE, "queued for prefill": Pool.PREFILL}.get(stage)
    prefill, decode = (
        make_config(pool, tiny_model, chaos=True, max_running_requests=1 if pool is few else 8, transfer=MANY_MESSAGES)
        for pool in (Pool.PREFILL, Pool.DECODE)
    )

    def layer_done(layer: int) -> None:
        hold.here(layer == 1 and stage in ("prefilling", "queued", "queued for prefill"))

    async with in_process(prefill, decode, layer_done=layer_done) as (*_, prefill_end, decode_end):
        blocker = None
        hold.armed.set()
        if few is not None:  # somebody else stands in the way, in prefill
            blocker = asyncio.create_task(generate(OTHER, prefill_end, decode_end))
            await hold.until_reached()
        timeout_s = DEADLINE_S if how == "deadline" else 30.0
        running = asyncio.create_task(generate(ASK, prefill_end, decode_end, timeout_s=timeout_s))
        await reach(stage, hold, prefill_end, decode_end)
        assert not running.done(), "the stage was not reached in time"
        if how == "cancel":
            running.cancel()
            await asyncio.wait((running,))
        else:
            assert isinstance(await ends_with(running), DeadlineExceeded)
        hold.released.set()
        if blocker is not None:
            assert len((await blocker).token_ids) == OTHER.max_tokens
        for pool, end in ((Pool.PREFILL, prefill_end), (Pool.DECODE, decode_end)):
            await end.idle(pool)
            await end.until(pool, nothing_crosses, timeout_s=5.0)  # a message that was issued returns first
        assert len((await generate(ASK, prefill_end, decode_end)).token_ids) == ASK.max_tokens


def nothing_crosses(load: shoal_pb2.WorkerLoad) -> bool:
    busy = load.num_transfers_in_flight or load.num_staging_in_use or load.num_staging_quarantined
    return not busy and not load.outstanding_token_layers


async def reach(stage: str, hold: Hold, prefill_end: Any, decode_end: Any) -> None:
    match stage:
        case "queued":
            await decode_end.until(Pool.DECODE, lambda load: load.num_waiting_reqs == 1)
        case "queued for prefill":
            await prefill_end.until(Pool.PREFILL, lambda load: load.num_waiting_reqs == 1)
        case "mid-transfer":
            await decode_end.until(Pool.DECODE, lambda load: load.num_transfers_in_flight == 1 and load.num_staging_in_use > 0)
        case _:
            await hold.until_reached()
