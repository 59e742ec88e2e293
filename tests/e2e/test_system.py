"""Whole clusters over real Ray, gRPC and Gloo: every answer equals the single-process reference, every byte the plan."""

import asyncio
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shoal.engine.decoder import Decoder
from shoal.engine.kv_pool import KvPool
from shoal.engine.local import LocalEngine, LocalRequest, LocalResult
from shoal.engine.weights import HeldLayers
from shoal.model_files import DEFAULT_MODEL, open_model
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.placement.arithmetic import decode_kv_layer_tokens, full_depth_wire_bytes, kv_bytes, wire_bytes
from shoal.rpc import open_channel
from shoal.types import DType, ModelShape, SamplingParams
from shoal.visibility import Visibility

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_REQUESTS = 32
TIE = 1e-4  # a step whose two best scores lie closer may go either way


@dataclass(frozen=True)
class Case:
    """One greedy request."""

    prompt_ids: tuple[int, ...]
    visibility: str  # with its boundary: nothing is left for the router to resolve
    max_tokens: int


def make_cases(model: str, visibilities: list[str], longest: int, max_tokens: int) -> list[Case]:
    rng = random.Random(model)
    vocabulary = open_model(model).config.shape.vocab_size
    lengths = [1, 2, 3, 16, 17, 64] + [rng.randrange(4, longest) for _ in range(NUM_REQUESTS - 6)]
    rng.shuffle(lengths)
    return [
        Case(
            tuple(rng.randrange(3, vocabulary) for _ in range(length)),
            visibilities[index % len(visibilities)],
            rng.randrange(1, max_tokens + 1),
        )
        for index, length in enumerate(lengths)
    ]


def reference(model: str, cases: list[Case]) -> list[LocalResult]:
    """What one process answers."""
    torch.set_num_threads(1)
    files = open_model(model)
    held = HeldLayers(range(files.config.shape.num_layers), range(0), embedding=True, head=True)
    decoder, _ = Decoder.load(files, dtype=DType.FLOAT32, held=held)
    engine = LocalEngine(decoder, KvPool(files.config.shape, 6000, 16, DType.FLOAT32))
    return engine.generate(
        LocalRequest(
            case.prompt_ids,
            Visibility.parse(case.visibility),
            SamplingParams(max_tokens=case.max_tokens, ignore_eos=True, num_logprobs=2),
        )
        for case in cases
    )


async def ask(stub: Any, case: Case) -> shoal_pb2.GenerateComplete:
    """The final message; the streamed ids must add up to its ids."""
    request = shoal_pb2.GenerateRequest(
        tokenized=shoal_pb2.TokenizedInput(input_ids=case.prompt_ids),
        sampling_params=shoal_pb2.SamplingParams(temperature=0, max_tokens=case.max_tokens, ignore_eos=True),
        stream=True,
        visibility=case.visibility,
    )
    streamed: list[int] = []
    async for response in stub.Generate(request, timeout=120):
        if response.HasField("complete"):
            assert list(response.complete.output_ids) == streamed
            return response.complete
        streamed += response.chunk.token_ids
    raise AssertionError("no final message")


async def ask_all(address: str, cases: list[Case]) -> list[shoal_pb2.GenerateComplete]:
    async with open_channel(address) as channel:
        stub = shoal_pb2_grpc.ShoalStub(channel)
        return await asyncio.gather(*(ask(stub, case) for case in cases))


def check_answer(case: Case, answer: shoal_pb2.GenerateComplete, expected: LocalResult, shape: ModelShape) -> bool:
    """Same tokens, bytes and KV. Returns whether the answer went the other way at a tie."""
    got, want = list(answer.output_ids), list(expected.token_ids)
    assert len(got) == len(want) == case.max_tokens and answer.finish_reason == "length"
    differs = next((index for index in range(len(want)) if got[index] != want[index]), None)
    if differs is not None:
        (_, best), (_, second) = expected.logprobs[differs].top
        assert best - second < TIE, (
            f"{case.visibility}, N={len(case.prompt_ids)}: token {differs} is {got[differs]}, not {want[differs]}"
        )
    visibility = Visibility.parse(answer.visibility)
    assert visibility == Visibility.parse(case.visibility).resolve(shape.num_layers)
    count, sent = len(case.prompt_ids), answer.transfer
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (count, case.max_tokens, 0)
    assert sent.payload_bytes == sent.plan_bytes == wire_bytes(shape, DType.FLOAT32, visibility, count)
    assert sent.full_depth_bytes == full_depth_wire_bytes(shape, DType.FLOAT32, visibility, count)
    assert bool(sent.prefill_worker) == bool(sent.payload_bytes)
    held = decode_kv_layer_tokens(shape, visibility, count, case.max_tokens)
    assert (answer.decode_kv.layer_tokens, answer.decode_kv.bytes) == (held, kv_bytes(shape, DType.FLOAT32, held))
    assert answer.num_retries == 0 and not answer.notices
    return differs is not None


TINY_VISIBILITIES = [
    "full:boundary=1",
    "speed:2:boundary=1",
    "speed:1:anchors=4:boundary=5",
    "pop:2:boundary=3",
    "pop:3:late:boundary=1",
    "speed:3:anchors=0:boundary=2",
    "full:boundary=4",
    "speed:4:boundary=2",
]
TINY_ALLOWED = "full,speed:2,speed:1:anchors=4,pop:2,pop:3:late,speed:3:anchors=0"


@pytest.fixture(scope="module")
def tiny_cases(tiny_model: Path) -> tuple[list[Case], list[LocalResult]]:
    cases = make_cases(str(tiny_model), TINY_VISIBILITIES, 400, 24)
    return cases, reference(str(tiny_model), cases)


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 1), (1, 2), (2, 2)])
async def test_32_requests_at_once_equal_the_reference(
    num_prefill: int,
    num_decode: int,
    tiny_model: Path,
    tiny_cases: tuple[list[Case], list[LocalResult]],
    serve: Callable[..., Any],
) -> None:
    cluster = serve(
        *("--model", str(tiny_model), "--visibilities", TINY_ALLOWED, "--token-budget", "128"),
        *("--prefill-workers", str(num_prefill), "--decode-workers", str(num_decode)),
    )
    cases, expected = tiny_cases
    answers = await ask_all(cluster.address, cases)
    shape = open_model(str(tiny_model)).config.shape
    ties = sum(check_answer(*row, shape) for row in zip(cases, answers, expected, strict=True))
    print(f"{num_prefill}P{num_decode}D: {ties} of {len(cases)} answers turned at a tie")
    assert {a.transfer.decode_worker for a in answers} == {f"decode-{i}" for i in range(num_decode)}
    assert {a.transfer.prefill_worker for a in answers} - {""} == {f"prefill-{i}" for i in range(num_prefill)}
    assert len(cluster.wait_until_idle()) == num_prefill + num_decode
    cluster.stop()


@pytest.fixture(scope="module")
def real(serve: Callable[..., Any]) -> Iterator[Any]:
    """The real model, one worker each, any visibility."""
    cluster = serve("--model", DEFAULT_MODEL, "--visibilities", "full,speed:22,pop:20,pop:20:late")
    yield cluster
    if cluster.process.poll() is None:
        cluster.stop()


async def test_32_requests_at_once_equal_the_reference_on_the_real_model(real: Any) -> None:
    allowed = ["full:boundary=1", "speed:22:boundary=3", "pop:20:boundary=1", "pop:20:late:boundary=2"]
    cases = make_cases(DEFAULT_MODEL, allowed, 80, 8)
    answers = await ask_all(real.address, cases)
    shape = open_model(DEFAULT_MODEL).config.shape
    rows = zip(cases, answers, reference(DEFAULT_MODEL, cases), strict=True)
    ties = sum(check_answer(*row, shape) for row in rows)
    print(f"1P1D, real model: {ties} of {len(cases)} answers turned at a tie")
    assert len(real.wait_until_idle()) == 2


def anonymous_bytes(process: psutil.Process) -> int:
    """Resident memory without pages of files, which the kernel takes from and gives to processes as it likes."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


async def test_a_prefill_worker_for_speed_22_holds_22_layers_and_its_memory_shows_it(serve: Callable[..., Any]) -> None:
    async def after_one_answer(kind: str) -> tuple[Any, int]:
        """Loads, and prefill's memory: of a worker that has done as much as the other, since allocators keep what was used."""
        cluster = serve("--model", DEFAULT_MODEL, "--visibilities", kind)
        case = make_cases(DEFAULT_MODEL, [f"{kind}:boundary=1"], 80, 8)[0]
        (answer,) = await ask_all(cluster.address, [case])
        assert answer.visibility == f"{kind}:boundary=1" and answer.completion_tokens == case.max_tokens
        found = cluster.loads(), anonymous_bytes(cluster.worker_process("prefill-0"))
        cluster.stop()
        return found

    full, full_bytes = await after_one_answer("full")
    shallow, shallow_bytes = await after_one_answer("speed:22")

    assert (shallow["prefill-0"].num_layers_held, full["prefill-0"].num_layers_held) == (22, 30)
    assert shallow["decode-0"].num_layers_held == 30
    # `full` runs layers 0 … 28 and, of the last one, only what makes K and V
    kv_parts = ("attn_norm", "attn_k", "attn_v")
    upper = [
        tensor
        for tensor in open_model(DEFAULT_MODEL).tensors.values()
        for layer in range(22, 30)
        if tensor.name.startswith(f"blk.{layer}.") and (layer < 29 or tensor.name.split(".")[2] in kv_parts)
    ]
    assert len(upper) == 7 * 9 + 3
    read = [loads["prefill-0"].weight_bytes_read for loads in (full, shallow)]
    assert read[0] - read[1] == sum(tensor.num_bytes for tensor in upper)
    upper_bytes = sum(4 * math.prod(tensor.shape) for tensor in upper)  # float32 in memory
    saved = full_bytes - shallow_bytes
    print(f"prefill read {read[0]:,} and {read[1]:,} bytes; resident: {saved / 1e6:.0f} MB less for {upper_bytes / 1e6:.0f} MB")
    assert saved > 0.7 * upper_bytes
    assert all(loads["prefill-0"].resident_bytes > upper_bytes for loads in (full, shallow))


def test_serve_killed_outright_leaves_nothing(real: Any) -> None:
    """Nobody is left to stop the others: they notice, drain and end. Ends this module's cluster."""
    before = real.descendants()
    real.process.kill()
    real.process.wait(5)
    _, left = psutil.wait_procs(before, timeout=30)
    assert not left, [process.name() for process in left]
