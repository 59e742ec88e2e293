"""Whoever leaves, dies or stalls: the others go on, errors come soon, and every block comes back."""

import asyncio
import dataclasses
import random
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.config.worker import Pool
from shoal.decode_worker.step_loop import DecodeStepLoop
from shoal.decode_worker.worker import DecodeWorker
from shoal.errors import Cancelled, DeadlineExceeded, InternalError, Unavailable
from shoal.model_files import write_random_model
from shoal.prefill_worker.worker import PrefillWorker
from shoal.rpc import open_channel
from tests.e2e.harness import (
    MIXED,
    TRANSFER,
    Ask,
    Endpoint,
    WorkerProcess,
    decode_request,
    ends_with,
    generate,
    generate_all,
    in_process,
    make_config,
    prefill_request,
    processes,
)

SOON_S = 2.0  # an error must reach the caller within this


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


def long_ask(text: str = "pop:1:late", seed: int = 0, num_tokens: int = 300, max_tokens: int = 8) -> Ask:
    rng = random.Random(seed)
    return Ask(tuple(rng.randrange(512) for _ in range(num_tokens)), text, max_tokens=max_tokens)


async def first_event(ask: Ask, decode: Endpoint) -> tuple[Any, Any]:
    """Reserve only: the open call and what was reserved."""
    call = decode.decode.Decode(decode_request(ask))
    return call, (await anext(aiter(call))).reserved


@pytest.mark.parametrize("backend", ["gloo", "ordered-gloo", "shared-memory"])
async def test_cancels_at_swept_moments_give_everything_back(model: Path, backend: str) -> None:
    """Callers leave at forty moments from before the reservation to past the last token; those who stay are not touched."""
    transfer = dataclasses.replace(TRANSFER, backend=backend)
    prefill = make_config(Pool.PREFILL, model, token_budget=24, transfer=transfer, num_blocks=900)
    decode = make_config(Pool.DECODE, model, token_budget=24, transfer=transfer, num_blocks=900)
    stay = long_ask("speed:2", seed=1, num_tokens=60, max_tokens=12)
    async with in_process(prefill, decode) as (*_, prefill_end, decode_end):
        expected = await generate(stay, prefill_end, decode_end)
        started = time.monotonic()
        await generate(long_ask(), prefill_end, decode_end)
        whole_s = 1.2 * (time.monotonic() - started)

        async def leave(index: int) -> bool:
            ask = long_ask(MIXED[index % len(MIXED)], seed=index)
            running = asyncio.create_task(generate(ask, prefill_end, decode_end))
            await asyncio.sleep(whole_s * index / 40)
            return running.cancel()

        for first in range(0, 40, 8):
            leaving = [leave(index) for index in range(first, first + 8)]
            *left, stayed = await asyncio.gather(*leaving, generate(stay, prefill_end, decode_end))
            assert stayed.token_ids == expected.token_ids  # type: ignore[union-attr]
            assert first > 16 or any(left)
            await prefill_end.idle(Pool.PREFILL)
            await decode_end.idle(Pool.DECODE)
        for pool, end in ((Pool.PREFILL, prefill_end), (Pool.DECODE, decode_end)):
            load = await end.until(pool, lambda load: load.num_staging_in_use == 0)
            assert load.num_staging_quarantined == 0
        assert (await generate(stay, prefill_end, decode_end)).token_ids == expected.token_ids


async def test_a_step_that_fails_ends_its_requests_and_no_others(model: Path) -> None:
    fail = [False]

    def layer_done(layer: int) -> None:
        if fail[0] and layer == 1:
            fail[0] = False
            raise RuntimeError("out of memory")

    prefill, decode = make_config(Pool.PREFILL, model), make_config(Pool.DECODE, model)
    async with in_process(prefill, decode, layer_done=layer_done) as (*_, prefill_end, decode_end):
        expected = await generate(long_ask("full"), prefill_end, decode_end)
        fail[0] = True
        error = await ends_with(generate(long_ask("full"), prefill_end, decode_end))
        assert isinstance(error, InternalError | Cancelled | Unavailable) and "out of memory" not in str(error)
        assert (await generate(long_ask("full"), prefill_end, decode_end)).token_ids == expected.token_ids


async def test_scores_that_are_no_numbers_end_their_request_and_no_other(model: Path) -> None:
    poison = 77  # as the last prompt token it is run by decode alone
    well = dataclasses.replace(long_ask("speed:2"), prompt_ids=tuple(t for t in long_ask().prompt_ids if t != poison))
    ill = dataclasses.replace(well, prompt_ids=(*well.prompt_ids, poison))
    prefill, decode = make_config(Pool.PREFILL, model), make_config(Pool.DECODE, model)
    async with in_process(prefill, decode) as (_, worker, prefill_end, decode_end):
        expected = await generate(well, prefill_end, decode_end)
        loaded = worker._loaded
        assert loaded is not None and loaded.resident.decoder.embedding is not None
        loaded.resident.decoder.embedding[poison] = float("nan")
        answer, error = await asyncio.gather(
            generate(well, prefill_end, decode_end), ends_with(generate(ill, prefill_end, decode_end))
        )
        assert isinstance(error, InternalError | Cancelled | Unavailable)
        assert answer.token_ids == expected.token_ids
        await decode_end.idle(Pool.DECODE)


async def test_a_worker_whose_step_loop_ends_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in deciding or accounting ends the loop: nobody is left waiting, and health is NOT_SERVING."""
    worker, prefill = DecodeWorker(make_config(Pool.DECODE, model)), PrefillWorker(make_config(Pool.PREFILL, model))
    ends = [Endpoint(await worker.start()), Endpoint(await prefill.start())]
    monkeypatch.setattr(DecodeStepLoop, "decide", lambda self: {}["no such request"])
    error = await ends_with(generate(long_ask("full"), ends[1], ends[0]))
    assert isinstance(error, InternalError) and "no such request" not in str(error)
    channel = open_channel(ends[0].address)
    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert isinstance(await ends_with(generate(long_ask("full"), ends[1], ends[0])), Unavailable)
    await ends[0].idle(Pool.DECODE)
    await channel.close()
    for end in ends:
        await end.close()
    await worker.stop()
    await prefill.stop()


async def test_a_reader_that_stops_reading_holds_nobody_up(model: Path) -> None:
    """Tokens wait for the slow reader; blocks and step do not."""
    slow, quick = long_ask("speed:2", max_tokens=200), long_ask("full", seed=2, max_tokens=20)
    async with in_process(make_config(Pool.PREFILL, model), make_config(Pool.DECODE, model)) as (*_, prefill_end, decode_end):
        expected = await generate(slow, prefill_end, decode_end)
        call = decode_end.decode.Decode(decode_request(slow))
        events = aiter(call)
        reserved = (await anext(events)).reserved
        await prefill_end.prefill.Prefill(prefill_request(slow, reserved))
        await generate(quick, prefill_end, decode_end)
        await decode_end.idle(Pool.DECODE)  # all is done and given back, and nothing has been read
        tokens = [token async for event in events for token in event.tokens.token_ids]
        assert tokens == expected.token_ids


async def test_deadline_and_lease_end_a_request_that_gets_nowhere(model: Path) -> None:
    prefill = make_config(Pool.PREFILL, model)
    decode = make_config(
        Pool.DECODE, model, max_running_requests=1, transfer=dataclasses.replace(TRANSFER, lease_s=0.6, heartbeat_s=0.2)
    )
    async with in_process(prefill, decode) as (*_, prefill_end, decode_end):
        call, _ = await first_event(long_ask(), decode_end)  # holds the only place; prefill is never called
        late = await ends_with(generate(long_ask(seed=1), prefill_end, decode_end, timeout_s=0.2))
        assert isinstance(late, DeadlineExceeded)
        with pytest.raises(grpc.aio.AioRpcError, match=r"within 0\.6 s") as expired:
            async for _ in call:
                pass
        assert expired.value.code() is grpc.StatusCode.UNAVAILABLE
        await decode_end.idle(Pool.DECODE)


@pytest.mark.e2e
@pytest.mark.parametrize("stalled_at", [0, 3])
async def test_a_killed_prefill_worker_takes_only_its_own_transfers_along(model: Path, tmp_path: Path, stalled_at: int) -> None:
    """kill -9 with a transfer stalled at a layer: that stream ends UNAVAILABLE soon, the rest of the worker's life goes on."""
    doomed = make_config(Pool.PREFILL, model, "prefill-a", chaos=True, token_budget=64)
    other = make_config(Pool.PREFILL, model, "prefill-b", chaos=True)
    decode = make_config(Pool.DECODE, model)
    # the second step stalls, at this layer: the first step's entries have left
    faults = {f"layer-{stalled_at}": {"action": "delay", "delay_s": 30.0, "skip": 1}}
    async with (
        processes(tmp_path, doomed, decode, faults=faults) as (doomed_process, decode_process),
        processes(tmp_path, other) as (other_process,),
    ):
        decode_end = decode_process.endpoint
        bystander = long_ask("full", seed=4, num_tokens=40, max_tokens=300)
        expected = await generate(bystander, other_process.endpoint, decode_end)
        decoding = asyncio.create_task(generate(bystander, other_process.endpoint, decode_end))
        victim = asyncio.create_task(generate(long_ask("full"), doomed_process.endpoint, decode_end))
        await doomed_process.endpoint.until(Pool.PREFILL, lambda load: load.num_transfers_in_flight > 0)
        await asyncio.sleep(0.2)
        assert not victim.done()
        doomed_process.kill()
        async with asyncio.timeout(SOON_S):
            assert isinstance(await ends_with(victim), Unavailable)
        assert (await decoding).token_ids == expected.token_ids
        assert (await generate(bystander, other_process.endpoint, decode_end)).token_ids == expected.token_ids
        await decode_end.idle(Pool.DECODE, timeout_s=SOON_S)
        again = await WorkerProcess.start(dataclasses.replace(doomed, epoch=1), tmp_path)
        assert (await generate(bystander, again.endpoint, decode_end)).token_ids == expected.token_ids
        await again.close()


@pytest.mark.e2e
async def test_a_killed_decode_worker_frees_the_prefill_worker(model: Path, tmp_path: Path) -> None:
    prefill = make_config(Pool.PREFILL, model, chaos=True)
    doomed, other = make_config(Pool.DECODE, model, "decode-a"), make_config(Pool.DECODE, model, "decode-b")
    faults = {"layer-3": {"action": "delay", "delay_s": 1.0, "skip": 1}}
    async with processes(tmp_path, prefill, doomed, other, faults=faults) as (prefill_process, doomed_process, other_process):
        prefill_end = prefill_process.endpoint
        call, reserved = await first_event(long_ask("full"), doomed_process.endpoint)
        prefilling = asyncio.ensure_future(prefill_end.prefill.Prefill(prefill_request(long_ask("full"), reserved)))
        await prefill_end.until(Pool.PREFILL, lambda load: load.num_transfers_in_flight > 0)
        await asyncio.sleep(0.1)
        assert not prefilling.done()
        doomed_process.kill()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await prefilling
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        call.cancel()
        await prefill_end.idle(Pool.PREFILL)
        expected = await generate(long_ask("full"), prefill_end, other_process.endpoint)
        again = await WorkerProcess.start(dataclasses.replace(doomed, epoch=1), tmp_path)
        assert (await generate(long_ask("full"), prefill_end, again.endpoint)).token_ids == expected.token_ids
        await again.close()


@pytest.mark.e2e
async def test_sigterm_finishes_what_was_begun(model: Path, tmp_path: Path) -> None:
    """Prefill stays until its KV is acknowledged, decode until its streams have ended; both then exit with status 0."""
    prefill, decode = make_config(Pool.PREFILL, model, chaos=True), make_config(Pool.DECODE, model)
    faults = {"layer-3": {"action": "delay", "delay_s": 0.5, "skip": 1}}
    async with processes(tmp_path, prefill, decode, faults=faults) as (prefill_process, decode_process):
        ask = long_ask("full", max_tokens=60)
        running = asyncio.create_task(generate(ask, prefill_process.endpoint, decode_process.endpoint))
        await prefill_process.endpoint.until(Pool.PREFILL, lambda load: load.num_transfers_in_flight > 0)
        for worker in (prefill_process, decode_process):
            worker.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert not running.done()
        refused = await ends_with(generate(ask, prefill_process.endpoint, decode_process.endpoint))
        assert isinstance(refused, Unavailable)
        assert len((await running).token_ids) == 60
        for worker in (prefill_process, decode_process):
            assert await asyncio.wait_for(worker.process.wait(), 15) == 0


async def test_everything_waits_its_turn_and_nothing_is_left(model: Path) -> None:
    """Full queues on both sides at once, callers that leave among them."""
    prefill = make_config(Pool.PREFILL, model, max_running_requests=2, token_budget=32)
    decode = make_config(Pool.DECODE, model, max_running_requests=3)
    asks = [long_ask(MIXED[index % len(MIXED)], seed=index, num_tokens=50) for index in range(24)]
    async with in_process(prefill, decode) as (*_, prefill_end, decode_end):
        alone = await generate_all(asks[:3], prefill_end, decode_end)
        running = [asyncio.create_task(generate(ask, prefill_end, decode_end)) for ask in asks]
        await asyncio.sleep(0.05)
        for leaving in running[5::3]:
            leaving.cancel()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        stayed = [outcome for index, outcome in enumerate(outcomes) if index < 5 or (index - 5) % 3]
        assert len(stayed) == 17 and not any(isinstance(outcome, BaseException) for outcome in stayed)
        assert [answer.token_ids for answer in alone] == [answer.token_ids for answer in outcomes[:3]]  # type: ignore[union-attr]
