"""What a cluster does when its processes die or hang: others go on, the dead return with a new epoch, errors come within 2 s."""

import asyncio
import json
import re
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import open_channel

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

# every message waits before it is read, so that a transfer of four layers takes over two seconds
SLOW_READS = {"before-post": {"action": "delay", "delay_s": 1.2, "times": None}}
ERROR_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def cluster(serve: Callable[..., Any], tiny_model: Path) -> Iterator[Any]:
    """Two workers in each pool, slow transfers, a short patience with silent workers."""
    started = serve(
        *("--model", str(tiny_model), "--visibilities", "full,speed:2", "--prefill-workers", "2", "--decode-workers", "2"),
        *("--hang-timeout-s", "3", "--chaos"),
        environment={"SHOAL_FAULTS": json.dumps(SLOW_READS)},
    )
    yield started
    if started.process.poll() is None:
        started.stop()


async def generate(
    stub: Any, num_prompt: int, max_tokens: int, *, first_token: asyncio.Event | None = None
) -> shoal_pb2.GenerateComplete | grpc.aio.AioRpcError:
    """The final message, or the error the call ended with."""
    request = shoal_pb2.GenerateRequest(
        tokenized=shoal_pb2.TokenizedInput(input_ids=[7 + index % 400 for index in range(num_prompt)]),
        sampling_params=shoal_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        stream=True,
        visibility="full",
        cache_salt=uuid.uuid4().hex,  # all send the same tokens, and each is to cross
    )
    try:
        async for response in stub.Generate(request, timeout=60):
            if response.HasField("complete"):
                return response.complete
            if first_token is not None:
                first_token.set()
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("no final message")


async def busy(cluster: Any, pool: str) -> set[str]:
    """Workers of a pool with a transfer in flight."""
    loads = await asyncio.to_thread(cluster.loads)
    return {name for name, load in loads.items() if load.pool == pool and load.num_transfers_in_flight}


async def wait_for(look: Callable[[], Any]) -> Any:
    async with asyncio.timeout(30):
        while not (seen := await look()):  # noqa: ASYNC110  (what is looked at lives in other processes)
            await asyncio.sleep(0.05)
        return seen


async def kill_mid_transfer(cluster: Any, pool: str) -> None:
    """Kill a worker while one request decodes elsewhere and another's KV is on its way to or from the worker."""
    epochs = {name: worker.epoch for name, worker in cluster.workers().items()}
    async with open_channel(cluster.address) as channel:
        stub = shoal_pb2_grpc.ShoalStub(channel)
        decoding = asyncio.Event()
        bystander = asyncio.create_task(generate(stub, 1, 900, first_token=decoding))  # one token: nothing to transfer
        await asyncio.wait_for(decoding.wait(), 20)
        holder = next(n for n, load in (await asyncio.to_thread(cluster.loads)).items() if load.num_running_reqs)

        async def victim() -> tuple[shoal_pb2.GenerateComplete | grpc.aio.AioRpcError, float]:
            return await generate(stub, 64, 4), time.monotonic()

        victims = [asyncio.create_task(victim()) for _ in range(2)]  # one for each worker of the pool

        async def others() -> set[str]:
            return await busy(cluster, pool) - {holder}

        name = min(await wait_for(others))
        process = cluster.worker_process(name)
        killed_at = time.monotonic()
        process.send_signal(signal.SIGKILL)

        hit = 0
        for end, ended_at in await asyncio.gather(*victims):
            if isinstance(end, grpc.aio.AioRpcError):
                assert end.code() is grpc.StatusCode.UNAVAILABLE, end
                after_s = ended_at - killed_at
                assert after_s < ERROR_WITHIN_S, f"{after_s:.1f} s after the kill: {end.details()}"
                hit += 1
            elif end.num_retries:
                assert end.notices and end.completion_tokens == 4  # retried elsewhere, and declared
                hit += 1
            else:
                assert end.completion_tokens == 4
        assert hit >= 1
        done = await bystander
        assert isinstance(done, shoal_pb2.GenerateComplete), done
        assert (done.completion_tokens, done.num_retries) == (900, 0)

    def returned() -> bool:
        worker = cluster.workers().get(name)
        return worker is not None and worker.epoch > epochs[name] and worker.state == "ready"

    await asyncio.to_thread(cluster.wait_for, returned)
    now = {other: worker.epoch for other, worker in cluster.workers().items() if other != name}
    assert now == {other: epoch for other, epoch in epochs.items() if other != name}
    await served_by(cluster, name, pool)
    await asyncio.to_thread(cluster.wait_until_idle, 15.0)


async def served_by(cluster: Any, name: str, pool: str) -> None:
    """The returned worker takes part in an answer."""

    async def one_uses_it() -> bool:
        async with open_channel(cluster.address) as channel:
            stub = shoal_pb2_grpc.ShoalStub(channel)
            answers = await asyncio.gather(*(generate(stub, 20, 2) for _ in range(4)))
        for answer in answers:
            assert isinstance(answer, shoal_pb2.GenerateComplete), answer
        return name in {getattr(answer.transfer, f"{pool}_worker") for answer in answers}

    await wait_for(one_uses_it)


async def test_a_killed_prefill_worker_fails_only_its_own_transfers_and_returns(cluster: Any) -> None:
    await kill_mid_transfer(cluster, "prefill")


async def test_a_killed_decode_worker_fails_only_its_own_requests_and_returns(cluster: Any) -> None:
    await kill_mid_transfer(cluster, "decode")


async def test_a_hung_worker_is_fenced_and_replaced(cluster: Any) -> None:
    before = cluster.workers()["prefill-1"]
    process = cluster.worker_process("prefill-1")
    process.suspend()

    def returned() -> bool:
        worker = cluster.workers().get("prefill-1")
        return worker is not None and worker.epoch > before.epoch and worker.state == "ready"

    await asyncio.to_thread(cluster.wait_for, returned)
    assert not process.is_running()
    await served_by(cluster, "prefill-1", "prefill")


async def test_a_killed_router_is_started_again_and_declared(cluster: Any) -> None:
    cluster.child("shoal.router").kill()

    async def serves() -> bool:
        async with open_channel(cluster.address) as channel:
            return isinstance(await generate(shoal_pb2_grpc.ShoalStub(channel), 5, 2), shoal_pb2.GenerateComplete)

    await wait_for(serves)
    assert "the router was killed by signal 9; starting it again" in cluster.log.read_text()


def test_a_lost_controller_ends_serve_with_words_and_leaves_nothing(cluster: Any) -> None:
    """Its Ray is gone with it, so nothing could be kept. Ends the cluster of this module."""
    cluster.wait_until_idle()
    before = cluster.descendants()
    cluster.child("shoal.launch.controller").kill()
    assert cluster.process.wait(40) == 1
    said = re.search(r"the controller was killed by signal 9 \(Ray's logs are in (\S+)\)", cluster.log.read_text())
    assert said is not None and Path(said[1], "session_latest").exists()
    shutil.rmtree(said[1])
    _, left = psutil.wait_procs(before, timeout=5)
    assert not left, [process.name() for process in left]
