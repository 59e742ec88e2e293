"""Two routers over the same workers: right answers through both, aborts that reach the other's requests, loads that both see."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal.config.router import RouterConfig
from shoal.engine.local import LocalRequest
from shoal.model_files import write_random_model
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.router.app import Router
from shoal.rpc import open_channel
from shoal.types import SamplingParams
from shoal.visibility import Visibility
from tests.e2e.harness import MIXED
from tests.e2e.served import Served, local, served
from tests.fakes.workers import until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"), max_context=4096)


@asynccontextmanager
async def second_router(first: Served, model: Path) -> AsyncIterator[tuple[Router, shoal_pb2_grpc.ShoalStub]]:
    """Another router that knows the workers of the first."""
    workers = tuple(f"{worker.config.pool}={worker.address}" for worker in (*first.prefill, *first.decode))
    visibilities = tuple(Visibility.parse(text) for text in MIXED)
    router = Router(
        RouterConfig(
            str(model), workers=workers, listen="127.0.0.1:0", visibilities=visibilities, flush_s=0.0, local_prefill_tokens=0
        )
    )
    address = str(await router.start())
    try:
        async with open_channel(address) as channel:
            await until(lambda: sum(worker.state == "ready" for worker in router.registry.workers) == len(workers), timeout_s=10)
            yield router, shoal_pb2_grpc.ShoalStub(channel)
    finally:
        await router.stop()


def asks(prompt: tuple[int, ...], max_tokens: int, request_id: str = "", n: int = 1) -> shoal_pb2.GenerateRequest:
    return shoal_pb2.GenerateRequest(
        request_id=request_id,
        tokenized=shoal_pb2.TokenizedInput(input_ids=prompt),
        sampling_params=shoal_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, n=n),
        visibility="full:boundary=1",
    )


async def answer(stub: shoal_pb2_grpc.ShoalStub, request: shoal_pb2.GenerateRequest) -> list[shoal_pb2.GenerateComplete]:
    return [reply.complete async for reply in stub.Generate(request, timeout=60) if reply.HasField("complete")]


async def test_both_answer_rightly_at_once(model: Path) -> None:
    prompts = [tuple(range(5 + index, 60 + 2 * index)) for index in range(6)]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = local(model, [LocalRequest(prompt, Visibility.parse("full:boundary=1"), sampling) for prompt in prompts])
    async with served(model, num_decode=2) as one, second_router(one, model) as (_, other):
        stubs = (one.stub, other)
        found = await asyncio.gather(*(answer(stubs[at % 2], asks(prompt, 8)) for at, prompt in enumerate(prompts)))
        for (complete,), reference in zip(found, expected, strict=True):
            assert tuple(complete.output_ids) == tuple(reference.token_ids) and not complete.num_retries


@pytest.mark.parametrize("n", [1, 2])
async def test_an_abort_reaches_a_request_that_came_through_the_other_router(model: Path, n: int) -> None:
    async with served(model, num_blocks=20_000) as one, second_router(one, model) as (_, other):
        mine, shared = asks((5, 6, 7), 2000, "mine", n), asks((5, 6, 8), 2000, "shared", n)
        running = [
            asyncio.create_task(answer(stub, ask)) for stub, ask in ((one.stub, mine), (one.stub, shared), (other, shared))
        ]
        await until(lambda: one.decode[0].load().num_running_reqs == 3, timeout_s=10)
        assert (await other.Abort(shoal_pb2.AbortRequest(request_ids=["unknown"]))).num_aborted == 0
        assert (await other.Abort(shoal_pb2.AbortRequest(request_ids=["shared"]))).num_aborted == 2
        for ended in await asyncio.gather(*running[1:]):
            assert [complete.finish_reason for complete in ended] == ["abort"] * n
            assert all(len(complete.output_ids) < 2000 and not complete.num_retries for complete in ended)
        assert not running[0].done()
        assert (await other.Abort(shoal_pb2.AbortRequest(request_ids=["mine", "shared"]))).num_aborted == 1
        assert [complete.finish_reason for complete in await running[0]] == ["abort"] * n


async def test_each_sees_what_the_other_sent(model: Path) -> None:
    async with served(model, num_decode=2) as one, second_router(one, model) as (router, other):
        long = asyncio.create_task(answer(one.stub, asks((5, 6, 7), 1500, "long")))
        busy = (await one.busy_worker()).config.worker_id

        def seen() -> dict[str, int]:
            return {worker.worker_id: worker.foreign_token_layers for worker in router.registry.pool("decode")}

        await until(lambda: seen()[busy] > 0, timeout_s=5)
        assert sum(seen().values()) == seen()[busy]  # the other worker has nothing
        for _ in range(4):  # so this router chooses the other one
            (complete,) = await answer(other, asks((9, 8, 7), 1))
            assert complete.transfer.decode_worker != busy
        await one.abort("long")
        await long
