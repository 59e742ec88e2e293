"""Two workers and a wire equal the single process, token for token, and ship exactly the plan."""

import asyncio
import dataclasses
import random
import re
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal.config.worker import Pool
from shoal.decode_worker.sink import DecodeSink
from shoal.decode_worker.worker import DecodeWorker
from shoal.engine.decoder import Decoder
from shoal.engine.kv_pool import KvPool
from shoal.engine.local import LocalEngine, LocalRequest, LocalResult
from shoal.engine.weights import HeldLayers
from shoal.errors import CapacityExceeded, InvalidConfig, InvalidRequest
from shoal.model_files import open_model, write_random_model
from shoal.pb.internal.v1 import worker_pb2 as pb
from shoal.placement.arithmetic import decode_kv_layer_tokens, wire_bytes
from shoal.placement.plan import Entry, make_plan
from shoal.prefill_worker.worker import PrefillWorker
from shoal.rpc import open_channel
from shoal.types import DType, ModelShape, SamplingParams
from shoal.visibility import Visibility
from tests.e2e.harness import (
    MIXED,
    TRANSFER,
    Answer,
    Ask,
    Endpoint,
    decode_request,
    ends_with,
    generate,
    generate_all,
    in_process,
    make_config,
    prefill_request,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shape(model: Path) -> ModelShape:
    return open_model(str(model)).config.shape


def local_results(model: Path, asks: Sequence[Ask], *, child: int = 0) -> list[LocalResult]:
    """The single-process reference, in one batch with chunks of its own."""
    files = open_model(str(model))
    decoder, _ = Decoder.load(files, dtype=DType.FLOAT32, held=HeldLayers.everything(files.config.shape.num_layers))
    engine = LocalEngine(decoder, KvPool(files.config.shape, 4096, 8, DType.FLOAT32), token_budget=29)
    return engine.generate(
        LocalRequest(
            ask.prompt_ids,
            Visibility.parse(ask.visibility),
            SamplingParams(
                ask.max_tokens,
                temperature=ask.temperature,
                seed=ask.seed,
                ignore_eos=True,
                stop_token_ids=ask.stop_token_ids,
                num_logprobs=ask.num_logprobs,
            ),
            replay_token_ids=ask.replay,
            child=child,
        )
        for ask in asks
    )


def make_asks(seed: int = 0, visibilities: Sequence[str] = MIXED) -> list[Ask]:
    """Every visibility at prompt lengths 1 (nothing to transfer) to several chunks and wire entries, greedy and sampled."""
    rng = random.Random(seed)
    asks = []
    for index, text in enumerate(visibilities * 2):
        num_tokens = [1, 2, 5, 17, 40, 70, 90][(index * 3 + index // len(visibilities)) % 7]
        boundary = f":boundary={rng.choice([2, 6])}" if index % 3 == 0 else ""
        temperature = 0.8 if index % 4 == 1 else 0.0
        prompt = tuple(rng.randrange(512) for _ in range(num_tokens))
        asks.append(Ask(prompt, text + boundary, max_tokens=1 + index % 8, temperature=temperature, seed=index))
    return asks


def assert_equal(asks: Sequence[Ask], answers: Sequence[Answer], results: Sequence[LocalResult], shape: ModelShape) -> None:
    assert len(asks) == len(answers) == len(results) > 0
    for ask, answer, result in zip(asks, answers, results, strict=True):
        visibility = Visibility.parse(ask.visibility).resolve(shape.num_layers)
        assert tuple(answer.token_ids) == result.token_ids, ask.visibility
        assert answer.finished is not None and answer.finished.finish_reason == str(result.finish_reason)
        expected = wire_bytes(shape, DType.FLOAT32, visibility, len(ask.prompt_ids), answer.reserved.cached_tokens)
        assert answer.reserved.plan_bytes == answer.finished.received_payload_bytes == expected
        assert answer.reserved.visibility == str(visibility)
        if expected:
            assert answer.prefill is not None and answer.prefill.sent_payload_bytes == expected
        else:
            assert answer.prefill is None and answer.reserved.num_entries == 0
        assert answer.finished.kv_layer_tokens == decode_kv_layer_tokens(
            shape, visibility, len(ask.prompt_ids), len(ask.replay) + len(answer.token_ids)
        )


@pytest.mark.parametrize(
    ("backend", "prefill_budget", "decode_budget"),
    [
        ("gloo", 64, 64),
        ("gloo", 7, 3),
        ("gloo", 1, 512),
        ("ordered-gloo", 16, 16),
        ("shared-memory", 64, 64),
        ("shared-memory", 7, 3),
    ],
)
async def test_mixed_visibilities_equal_the_single_process(
    model: Path, shape: ModelShape, backend: str, prefill_budget: int, decode_budget: int
) -> None:
    asks = make_asks()
    transfer = dataclasses.replace(TRANSFER, backend=backend)
    prefill = make_config(Pool.PREFILL, model, token_budget=prefill_budget, transfer=transfer)
    decode = make_config(Pool.DECODE, model, token_budget=decode_budget, transfer=transfer, max_running_requests=9)
    async with in_process(prefill, decode) as (_, _, prefill_end, decode_end):
        answers = await generate_all(asks, prefill_end, decode_end)
        alone = [await generate(ask, prefill_end, decode_end) for ask in asks[::5]]
    assert_equal(asks, answers, local_results(model, asks), shape)
    assert [answer.token_ids for answer in alone] == [answer.token_ids for answer in answers[::5]]


@pytest.mark.parametrize(("architecture", "num_global_layers"), [("mistral", 0), ("qwen3", 2), ("gemma2", 0)])
async def test_window_layers_ship_only_what_is_seen(tmp_path: Path, architecture: str, num_global_layers: int) -> None:
    """What a window hides stays behind: decode's blocks hold other requests' leavings there, and no token differs."""
    window = write_random_model(tmp_path, architecture=architecture, sliding_window=9, num_global_layers=num_global_layers)
    asks = make_asks(seed=7, visibilities=(*MIXED, "speed:2:sink"))
    shape = open_model(str(window)).config.shape
    expected = (9, None, 9, None) if architecture == "gemma2" else (None,) * num_global_layers + (9,) * (4 - num_global_layers)
    assert shape.windows == expected
    allowed = tuple(Visibility.parse(text) for text in (*MIXED, "speed:2:sink"))
    configs = [
        make_config(pool, window, allowed_visibilities=allowed, num_blocks=300, token_budget=11)
        for pool in (Pool.PREFILL, Pool.DECODE)
    ]
    async with in_process(*configs) as (*_, prefill_end, decode_end):
        for _ in range(2):  # the second time over the first one's blocks
            answers = await generate_all(asks, prefill_end, decode_end)
            assert_equal(asks, answers, local_results(window, asks), shape)


async def test_bfloat16_ships_half_the_bytes(model: Path, shape: ModelShape) -> None:
    asks = make_asks(seed=3)
    configs = [make_config(pool, model, dtype=DType.BFLOAT16) for pool in (Pool.PREFILL, Pool.DECODE)]
    async with in_process(*configs) as (*_, prefill_end, decode_end):
        answers = await generate_all(asks, prefill_end, decode_end)
    for ask, answer in zip(asks, answers, strict=True):
        visibility = Visibility.parse(ask.visibility).resolve(shape.num_layers)
        assert answer.finished is not None and len(answer.token_ids) == ask.max_tokens
        expected = wire_bytes(shape, DType.FLOAT32, visibility, len(ask.prompt_ids)) // 2
        assert answer.finished.received_payload_bytes == answer.reserved.plan_bytes == expected


async def test_a_resumed_request_goes_on_as_if_nothing_had_happened(model: Path, shape: ModelShape) -> None:
    """Replayed tokens are run as decode tokens at their positions and not streamed again; N and b stay."""
    rng = random.Random(5)
    prompt = tuple(rng.randrange(512) for _ in range(37))
    whole = [Ask(prompt, text, max_tokens=8, temperature=0.7, seed=3) for text in MIXED]
    results = local_results(model, whole)
    rest = [
        dataclasses.replace(ask, replay=result.token_ids[:5], max_tokens=3) for ask, result in zip(whole, results, strict=True)
    ]
    async with in_process(make_config(Pool.PREFILL, model), make_config(Pool.DECODE, model)) as (*_, prefill_end, decode_end):
        answers = await generate_all(rest, prefill_end, decode_end)
    assert [tuple(answer.token_ids) for answer in answers] == [result.token_ids[5:] for result in results]
    assert_equal(rest, answers, local_results(model, rest), shape)


async def test_stop_ids_logprobs_and_length(model: Path) -> None:
    prompt = tuple(range(40, 70))
    plain = Ask(prompt, "speed:2", max_tokens=6, num_logprobs=3)
    [expected] = local_results(model, [plain])
    stop = expected.token_ids[2]
    stopping = dataclasses.replace(plain, stop_token_ids=(stop,), max_tokens=50)
    async with in_process(make_config(Pool.PREFILL, model), make_config(Pool.DECODE, model)) as (*_, prefill_end, decode_end):
        answer = await generate(plain, prefill_end, decode_end)
        stopped = await generate(stopping, prefill_end, decode_end)
    assert tuple(answer.token_ids) == expected.token_ids
    assert answer.logprobs == pytest.approx([token.logprob for token in expected.logprobs], abs=1e-3)
    for ours, theirs in zip(answer.top, expected.logprobs, strict=True):
        assert ours == pytest.approx(dict(theirs.top), abs=1e-3) and len(ours) == 3
    assert stopped.token_ids == list(expected.token_ids[: expected.token_ids.index(stop) + 1])
    assert stopped.finished is not None and answer.finished is not None
    assert (stopped.finished.finish_reason, stopped.finished.matched_token_id) == ("stop", stop)
    assert answer.finished.finish_reason == "length" and not answer.finished.HasField("matched_token_id")
    assert 0 < answer.finished.transfer_done_ms <= answer.finished.first_token_ms


async def test_a_pool_of_two_requests_finishes_thirty_two(model: Path, shape: ModelShape) -> None:
    """Those that wait for blocks hold none, so all get their turn, in order of arrival."""
    asks = [Ask(tuple(range(index, index + 60)), MIXED[index % len(MIXED)], max_tokens=4) for index in range(32)]
    num_blocks = 2 * 4 * -(-63 // 8) + 4  # two requests at full depth, and room for a few deep states
    prefill = make_config(Pool.PREFILL, model, num_blocks=num_blocks)
    decode = make_config(Pool.DECODE, model, num_blocks=num_blocks)
    async with in_process(prefill, decode) as (*_, prefill_end, decode_end):
        answers = await generate_all(asks, prefill_end, decode_end)
    assert_equal(asks, answers, local_results(model, asks), shape)


@pytest.mark.parametrize("text", ["full", "pop:2", "speed:3:anchors=4"])
async def test_layers_arrive_while_later_layers_compute(model: Path, text: str) -> None:
    """The last layer of the only step is held back until every entry of the earlier layers lies in decode's pool."""
    held, release = threading.Event(), threading.Event()
    ask = Ask(tuple(range(100, 140)), text, max_tokens=2)
    last = {"full": 3, "pop:2": 3, "speed:3:anchors=4": 2}[text]

    def layer_done(layer: int) -> None:
        if layer == last:
            held.set()
            assert release.wait(20)

    prefill, decode = make_config(Pool.PREFILL, model), make_config(Pool.DECODE, model)
    async with in_process(prefill, decode, layer_done=layer_done) as (_, decode_worker, prefill_end, decode_end):
        arrived: set[tuple[str, int, int]] = set()
        unpack, news, loop = DecodeSink.unpack, asyncio.Event(), asyncio.get_running_loop()

        def watched(self: DecodeSink, entry: Entry, data: torch.Tensor) -> None:
            unpack(self, entry, data)
            arrived.add((str(entry.kind), entry.layer, entry.start))
            loop.call_soon_threadsafe(news.set)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DecodeSink, "unpack", watched)
            running = asyncio.create_task(generate(ask, prefill_end, decode_end))
            assert await asyncio.to_thread(held.wait, 20)
            visibility = Visibility.parse(text).resolve(4)
            plan = make_plan(decode_worker.shape, DType.FLOAT32, visibility, 40, 0, max_entry_bytes=8 << 20, max_entry_tokens=16)
            early = {(str(e.kind), e.layer, e.start) for e in plan.entries if e.layer < last}
            try:
                async with asyncio.timeout(10):
                    while arrived != early:
                        await news.wait()
                        news.clear()
            finally:
                release.set()
            assert len(early) == last * 3  # 39 prefill tokens in wire entries of 16
            assert (await running).token_ids


async def test_refusals_come_with_words(model: Path) -> None:
    prefill = make_config(Pool.PREFILL, model, allowed_visibilities=(Visibility.parse("speed:2"),))
    decode = make_config(Pool.DECODE, model, num_blocks=64, max_queued=0, max_context_tokens=200)
    ask = Ask(tuple(range(60)), "speed:2", max_tokens=4)
    async with in_process(prefill, decode) as (*_, prefill_end, decode_end):
        assert "empty" in str(await ends_with(generate(dataclasses.replace(ask, prompt_ids=()), prefill_end, decode_end)))
        too_long = dataclasses.replace(ask, max_tokens=141)
        error = await ends_with(generate(too_long, prefill_end, decode_end))
        assert isinstance(error, InvalidRequest) and "context of 200" in str(error)
        large = dataclasses.replace(ask, max_tokens=120, visibility="full")
        too_large = await ends_with(generate(large, prefill_end, decode_end))
        assert isinstance(too_large, InvalidRequest) and "64 in all" in str(too_large)
        advised = int(re.findall(r"max_tokens to at most (\d+)", str(too_large))[0])
        fitting = dataclasses.replace(large, max_tokens=advised)
        assert "not allowed" in str(await ends_with(generate(fitting, prefill_end, decode_end)))  # by prefill: decode took it
        not_here = await ends_with(generate(dataclasses.replace(ask, visibility="full"), prefill_end, decode_end))
        assert isinstance(not_here, InvalidRequest) and "not allowed on this worker; allowed: speed:2" in str(not_here)
        await decode_end.idle(Pool.DECODE)

        call = decode_end.decode.Decode(decode_request(ask))
        first = await anext(aiter(call))
        refused = await ends_with(generate(dataclasses.replace(ask, prompt_ids=tuple(range(190))), prefill_end, decode_end))
        assert isinstance(refused, CapacityExceeded)  # no queue, and the first holds most of the pool
        good = prefill_request(ask, first.reserved)
        for field, value, words in (
            ("plan_digest", "0" * 32, "start both pools with the same"),
            ("num_prompt_tokens", 70, "69 prefill tokens"),
            ("decode_epoch", 9, "epoch 9"),
            ("attempt_id", "", "1 … 256 characters"),
        ):
            bad = pb.PrefillRequest()
            bad.CopyFrom(good)
            setattr(bad, field, value)
            with pytest.raises(grpc.aio.AioRpcError, match=words):
                await prefill_end.prefill.Prefill(bad, timeout=20)
        await prefill_end.idle(Pool.PREFILL)
        twice = [prefill_end.prefill.Prefill(good, timeout=20) for _ in range(2)]
        outcomes = await asyncio.gather(*twice, return_exceptions=True)
        assert sum(isinstance(outcome, pb.PrefillResponse) for outcome in outcomes) == 1
        call.cancel()


async def test_a_worker_says_what_it_holds(model: Path) -> None:
    """A `speed:2` prefill worker opens layers 0 and 1 only; health is SERVING once loaded and NOT_SERVING while draining."""
    progress: list[tuple[int, int]] = []
    worker = PrefillWorker(
        make_config(Pool.PREFILL, model, allowed_visibilities=(Visibility.parse("speed:2"),)),
        lambda done, total: progress.append((done, total)),
        layer_done=lambda layer: time.sleep(0.2),
    )
    whole = DecodeWorker(make_config(Pool.DECODE, model))
    ends = [Endpoint(await each.start()) for each in (worker, whole)]
    channel = open_channel(ends[0].address)
    health = health_pb2_grpc.HealthStub(channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="shoal.internal.v1.PrefillWorker"))
    states = aiter(watch)
    assert (await anext(states)).status == health_pb2.HealthCheckResponse.SERVING
    loads = [await ends[0].load(Pool.PREFILL), await ends[1].load(Pool.DECODE)]
    assert [load.num_layers_held for load in loads] == [2, 4]
    assert 0 < loads[0].weight_bytes_read < loads[1].weight_bytes_read and progress[-1][0] == progress[-1][1]
    assert all(load.num_total_blocks == 4096 and load.resident_bytes > 0 for load in loads)
    described = await ends[0].prefill.Describe(pb.DescribeRequest())
    assert list(described.allowed_visibilities) == ["speed:2"] and described.address == ends[0].address
    assert described.fingerprint == (await ends[1].decode.Describe(pb.DescribeRequest())).fingerprint
    running = asyncio.create_task(generate(Ask(tuple(range(3, 30)), "speed:2", 3), *ends))
    await ends[0].until(Pool.PREFILL, lambda load: load.num_reservations > 0)
    stopping = asyncio.create_task(worker.stop(20.0))
    assert (await anext(states)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert len((await running).token_ids) == 3, "what was running is finished first"
    await stopping
    await whole.stop(0.0)
    await channel.close()
    for end in ends:
        await end.close()


async def test_a_port_in_use_is_refused_before_weights_are_read(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for kind, pool in ((PrefillWorker, Pool.PREFILL), (DecodeWorker, Pool.DECODE)):
            with pytest.raises(InvalidConfig, match="port is in use"):
                await kind(make_config(pool, model, port=taken.getsockname()[1])).start()


async def test_too_little_memory_is_refused_before_weights_are_read(model: Path) -> None:
    progress: list[tuple[int, int]] = []
    worker = DecodeWorker(
        make_config(Pool.DECODE, model, num_blocks=7, min_request_tokens=16), lambda *step: progress.append(step)
    )
    with pytest.raises(InvalidConfig, match="too little KV memory"):
        await worker.start()
    assert progress == []
