"""Sampling through router and workers: split or not, streamed or not, alone or in a batch, the tokens are equal."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from shoal.engine.local import LocalRequest
from shoal.model_files import write_random_model
from shoal.pb.internal.v1 import worker_pb2 as pb
from shoal.pb.v1 import shoal_pb2
from shoal.types import SamplingParams
from shoal.visibility import Visibility
from tests.e2e.harness import MIXED, Ask, Endpoint, decode_request, prefill_request
from tests.e2e.served import Served, ask, local, served

VOCAB = 512
EOS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


def random_sampling(rng: random.Random) -> dict[str, Any]:
    """A few parameters, each in its range; the names are those of the public message."""
    chosen: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "seed": rng.getrandbits(64), "ignore_eos": rng.random() < 0.5}
    options: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 1.7]),
        "top_p": rng.choice([0.3, 0.9, 1.0]),
        "top_k": rng.choice([0, 1, 5, 100]),
        "min_p": rng.choice([0.0, 0.05, 0.5]),
        "repetition_penalty": rng.choice([0.5, 1.0, 1.5, 3.0]),
        "presence_penalty": rng.choice([-2.0, 0.5, 2.0]),
        "frequency_penalty": rng.choice([-1.0, 0.5, 2.0]),
        "logit_bias": {rng.randrange(VOCAB): rng.choice([-100.0, 2.0, 5.0]) for _ in range(3)},
        "logprobs": rng.choice([0, 3]),
        "stop_token_ids": [rng.randrange(VOCAB) for _ in range(30)],
    }
    chosen |= {name: value for name, value in options.items() if rng.random() < 0.6}
    if rng.random() < 0.3:
        chosen["min_tokens"] = rng.randint(0, chosen["max_tokens"])
    return chosen


def as_local(request: shoal_pb2.GenerateRequest, child: int = 0, **changes: Any) -> LocalRequest:
    """The same request for the single process."""
    message = request.sampling_params
    names = ("temperature", "top_k", "seed", "ignore_eos", "min_p", "presence_penalty", "frequency_penalty", "min_tokens")
    params = SamplingParams(
        max_tokens=message.max_tokens,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        repetition_penalty=message.repetition_penalty or 1.0,
        stop_token_ids=tuple(message.stop_token_ids),
        num_logprobs=message.logprobs if message.HasField("logprobs") else None,
        logit_bias=tuple(message.logit_bias.items()),
        **{name: getattr(message, name) for name in names},
    )
    ids = tuple(request.tokenized.input_ids)
    return LocalRequest(ids, Visibility.parse(request.visibility), params, child=child, **changes)


async def ids_of(cluster: Served, request: shoal_pb2.GenerateRequest) -> list[list[int]]:
    return [list(complete.output_ids) for complete in await cluster.completes(request)]


async def test_random_requests_answer_alike_streamed_unary_batched_split_or_not(model: Path) -> None:
    rng = random.Random(7)
    requests = []
    for index in range(24):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 9, 33, 60]))]
        requests.append(ask(prompt, MIXED[index % len(MIXED)], stream=index % 2 == 0, **random_sampling(rng)))
    expected = local(model, [as_local(request) for request in requests], token_budget=37)
    async with served(model, token_budget=48) as cluster:
        together = await asyncio.gather(*(cluster.replies(request) for request in requests))
        for request, replies, result in zip(requests, together, expected, strict=True):
            *chunks, last = replies
            done = last.complete
            assert tuple(done.output_ids) == result.token_ids, request
            assert (done.finish_reason, done.completion_tokens) == (str(result.finish_reason), len(result.token_ids))
            if request.stream:
                assert [i for r in chunks for i in r.chunk.token_ids] == list(done.output_ids)
                assert "".join(r.chunk.text for r in chunks) == done.text
                logprobs = [value for r in chunks for value in r.chunk.output_logprobs.token_logprobs]
                assert logprobs == list(done.output_logprobs.token_logprobs)
            else:
                assert not chunks
            assert len(done.output_logprobs.token_logprobs) == (
                len(result.token_ids) if request.sampling_params.HasField("logprobs") else 0
            )
            assert list(done.output_logprobs.token_logprobs) == pytest.approx([t.logprob for t in result.logprobs], abs=1e-3)
        for request, replies in list(zip(requests, together, strict=True))[::4]:
            other = shoal_pb2.GenerateRequest()
            other.CopyFrom(request)
            other.stream = not request.stream
            alone = (await cluster.replies(other))[-1].complete
            done = replies[-1].complete
            assert (alone.output_ids, alone.text, alone.completion_tokens) == (done.output_ids, done.text, done.completion_tokens)
    assert sum(request.sampling_params.temperature > 0 for request in requests) > 5  # the drawn cases are there


async def test_children_are_what_separate_requests_keyed_by_child_would_be(model: Path) -> None:
    """n = 4 over every visibility, at prompt lengths that end within a block, at its border, and with nothing to transfer."""
    rng = random.Random(3)
    async with served(model) as cluster:
        for index, text in enumerate(MIXED):
            prompt = [rng.randrange(VOCAB) for _ in range([21, 16, 1, 40, 17, 24, 9][index])]
            boundary = ":boundary=3" if index % 2 else ""
            request = ask(
                prompt, text + boundary, n=4, temperature=1.2, seed=index, max_tokens=9, presence_penalty=0.5, logprobs=1
            )
            expected = local(model, as_local(request).children(4))
            request.stream = True
            replies = await cluster.replies(request)
            completes = {r.complete.index: r.complete for r in replies if r.HasField("complete")}
            assert sorted(completes) == [0, 1, 2, 3] and len({tuple(c.output_ids) for c in completes.values()}) > 1
            for child, result in enumerate(expected):
                done, chunks = completes[child], [r.chunk for r in replies if r.HasField("chunk") and r.chunk.index == child]
                assert tuple(done.output_ids) == result.token_ids, (text, child)
                assert [i for chunk in chunks for i in chunk.token_ids] == list(done.output_ids)
                assert [chunk.completion_tokens for chunk in chunks][-1] == done.completion_tokens == 9
                assert list(done.output_logprobs.token_logprobs) == pytest.approx([t.logprob for t in result.logprobs], abs=1e-3)
                assert done.transfer.payload_bytes == done.transfer.plan_bytes == completes[0].transfer.payload_bytes
            assert await ids_of(
                cluster, ask(prompt, text + boundary, temperature=1.2, seed=index, max_tokens=9, presence_penalty=0.5)
            ) == [list(expected[0].token_ids)]
            await cluster.all_free()


async def test_children_end_each_in_its_own_way_and_free_their_blocks(model: Path) -> None:
    sampling: dict[str, Any] = {"temperature": 2.5, "seed": 5, "max_tokens": 30}
    prompt = list(range(40, 61))
    free = local(model, [as_local(ask(prompt, "speed:2", **sampling), child) for child in range(4)])
    stop = [free[1].token_ids[0], free[2].token_ids[4]]  # child 1 ends with its first token, another one later
    request = ask(prompt, "speed:2", n=4, stop_token_ids=stop, **sampling)
    expected = local(model, as_local(request).children(4))
    assert len({len(result.token_ids) for result in expected}) > 2 and len(expected[1].token_ids) == 1
    async with served(model) as cluster:
        completes = await cluster.completes(request)
        assert [tuple(c.output_ids) for c in completes] == [result.token_ids for result in expected]
        assert [c.finish_reason for c in completes] == [str(result.finish_reason) for result in expected]
        assert completes[1].matched_token_id == stop[0]


async def test_a_stop_string_ends_one_child_on_decode_too(model: Path) -> None:
    """Decode does not know of the match; it is told, and the child's blocks are free long before the others end."""
    prompt = list(range(70, 95))
    async with served(model) as cluster:
        request = ask(prompt, "full", n=2, temperature=1.3, seed=1, max_tokens=400, stream=True)
        texts: dict[int, str] = {0: "", 1: ""}
        call = cluster.stub.Generate(request)
        async for reply in call:
            texts[reply.chunk.index] += reply.chunk.text
            if min(map(len, texts.values())) > 12:
                break
        call.cancel()
        await cluster.all_free()
        stop = next(
            texts[0][i : i + 3]
            for i in range(4, 9)
            if texts[0][i : i + 3] not in texts[1] and texts[0].index(texts[0][i : i + 3]) == i
        )
        request.sampling_params.stop.append(stop)
        request.sampling_params.max_tokens = 300
        used: list[int] = []
        completes = []
        call = cluster.stub.Generate(request)
        async for reply in call:
            if reply.HasField("complete"):
                completes.append(reply.complete)
            if completes:
                used.append((await cluster.decode_ends[0].load(cluster.decode[0].config.pool)).num_used_blocks)
            if len(used) > 30:
                break
        call.cancel()
        first = completes[0]
        assert (first.index, first.finish_reason, first.matched_stop_str) == (0, "stop", stop)
        assert first.text == texts[0][: texts[0].index(stop)]
        whole = 4 * -(-(len(prompt) + 299) // 8)  # one child's table
        assert used[-1] <= whole  # the other one's own blocks alone are left


async def test_stops_are_shown_when_asked_for_and_not_before_min_tokens(model: Path) -> None:
    prompt = list(range(100, 120))
    async with served(model) as cluster:
        plain = (await cluster.completes(ask(prompt, max_tokens=40)))[0]
        stop = plain.text[6:8]
        cut = plain.text.index(stop)
        for shown, text in ((False, plain.text[:cut]), (True, plain.text[: cut + len(stop)])):
            for stream in (False, True):
                request = ask(prompt, max_tokens=40, stop=[stop], include_stop_str_in_output=shown, stream=stream)
                *chunks, last = await cluster.replies(request)
                assert (last.complete.text, last.complete.finish_reason) == (text, "stop")
                assert not stream or "".join(r.chunk.text for r in chunks) == text
        late = (await cluster.completes(ask(prompt, max_tokens=40, stop=[stop], min_tokens=40)))[0]
        assert (late.text, late.finish_reason, late.completion_tokens) == (plain.text, "length", 40)


async def test_first_token_as_eos_as_stop_id_and_masked_by_min_tokens(model: Path) -> None:
    prompt = list(range(7, 30))
    async with served(model) as cluster:
        for text in ("full", "speed:2", "pop:1:late"):
            bias = {EOS: 100.0}
            eos = (await cluster.completes(ask(prompt, text, logit_bias=bias, ignore_eos=False, logprobs=2, max_tokens=50)))[0]
            assert (list(eos.output_ids), eos.finish_reason, eos.matched_token_id, eos.text) == ([EOS], "stop", EOS, "")
            assert len(eos.output_logprobs.token_logprobs) == 1 and eos.output_logprobs.token_logprobs[0] < -0.1  # raw
            first = (await cluster.completes(ask(prompt, text, max_tokens=1)))[0].output_ids[0]
            stopped = (await cluster.completes(ask(prompt, text, stop_token_ids=[first], max_tokens=50)))[0]
            assert (list(stopped.output_ids), stopped.matched_token_id) == ([first], first)
            held = (await cluster.completes(ask(prompt, text, logit_bias=bias, ignore_eos=False, min_tokens=4, max_tokens=50)))[0]
            assert EOS not in list(held.output_ids)[:4] and list(held.output_ids)[4:] == [EOS] and held.finish_reason == "stop"


async def test_seeds_reproduce_over_worker_pairs_and_batch_sizes(model: Path) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(5, 40))] for _ in range(8)]
    requests = [
        ask(
            prompt,
            MIXED[i % len(MIXED)],
            temperature=1.0,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.2,
            seed=100 + i,
            max_tokens=10,
        )
        for i, prompt in enumerate(prompts)
    ]
    sizes = [{"token_budget": 16, "max_running_requests": 2}, {"token_budget": 64}]
    async with served(model, 2, 2, decode=sizes) as cluster:
        first = await asyncio.gather(*(ids_of(cluster, request) for request in requests))
        pairs = set()
        for _ in range(3):
            crowd = [asyncio.create_task(ids_of(cluster, ask(prompts[0], max_tokens=20, temperature=0.9))) for _ in range(4)]
            for request, expected in zip(requests, first, strict=True):
                [done] = await cluster.completes(request)
                pairs.add((done.transfer.prefill_worker, done.transfer.decode_worker))
                assert [list(done.output_ids)] == expected
            await asyncio.gather(*crowd)
    assert len(pairs) > 1
    assert [tuple(ids[0]) for ids in first] == [result.token_ids for result in local(model, [as_local(r) for r in requests])]


async def test_cancelled_children_leave_nothing(model: Path) -> None:
    rng = random.Random(2)
    async with served(model) as cluster:
        for when in (0, 1, 5, 20):
            request = ask([rng.randrange(VOCAB) for _ in range(37)], "speed:2", n=4, temperature=1.0, max_tokens=300, stream=True)
            call = cluster.stub.Generate(request)
            for _ in range(when):
                await call.read()
            call.cancel()
            await cluster.all_free()
        request.request_id = "all"
        running = asyncio.create_task(cluster.completes(request))
        await cluster.abort("all")
        assert [c.finish_reason for c in await running] == ["abort"] * 4


def resumed(request: shoal_pb2.GenerateRequest, cut: int, result: tuple[int, ...], child: int) -> LocalRequest:
    whole = as_local(request, child)
    left = replace(whole.sampling, max_tokens=whole.sampling.max_tokens - cut, min_tokens=max(0, whole.sampling.min_tokens - cut))
    return replace(whole, sampling=left, replay_token_ids=result[:cut])


def test_penalties_and_min_tokens_are_rebuilt_exactly_from_replayed_tokens(model: Path) -> None:
    rng = random.Random(21)
    for trial in range(12):
        sampling = random_sampling(rng) | {"max_tokens": 10, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "min_tokens": 6}
        request = ask([rng.randrange(VOCAB) for _ in range(15)], MIXED[trial % len(MIXED)], **sampling)
        [whole] = local(model, [as_local(request, 1)])
        for cut in (1, 4, 7):
            if cut < len(whole.token_ids):
                [rest] = local(model, [resumed(request, cut, whole.token_ids, 1)])
                assert rest.token_ids == whole.token_ids[cut:]


@pytest.mark.parametrize("num_children", [1, 3])
async def test_a_failed_decode_worker_is_resumed_with_its_children(model: Path, num_children: int) -> None:
    """One of two decode workers stops mid-answer; every child goes on elsewhere, penalties and all, none repeats a token."""
    sampling: dict[str, Any] = {
        "n": num_children,
        "temperature": 1.1,
        "seed": 9,
        "max_tokens": 60,
        "frequency_penalty": 0.8,
        "min_tokens": 30,
    }
    request = ask(list(range(20, 53)), "speed:2", stream=True, **sampling)
    expected = local(model, as_local(request).children(num_children))
    async with served(model, 1, 2) as cluster:
        got: dict[int, list[int]] = {child: [] for child in range(num_children)}
        ends: dict[int, shoal_pb2.GenerateComplete] = {}
        stopping: asyncio.Task[None] | None = None
        async for reply in cluster.stub.Generate(request):
            if reply.HasField("complete"):
                ends[reply.complete.index] = reply.complete
                continue
            got[reply.chunk.index] += reply.chunk.token_ids
            if stopping is None and min(map(len, got.values())) > 3:
                stopping = asyncio.create_task(cluster.stop(await cluster.busy_worker()))
        assert stopping is not None
        await stopping
        assert [tuple(got[child]) for child in got] == [result.token_ids for result in expected]
        assert [tuple(ends[child].output_ids) for child in got] == [result.token_ids for result in expected]
        assert ends[0].num_retries == 1 and "resumed after" in ends[0].notices[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 0}, r"n must lie in 1…128, not 0"),
        ({"n": 129}, r"n must lie in 1…128"),
        ({"min_p": -0.1}, "min_p must lie"),
        ({"min_p": 1.5}, "min_p must lie"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be"),
        ({"presence_penalty": 2.5}, "presence_penalty must lie"),
        ({"frequency_penalty": -3.0}, "frequency_penalty must lie"),
        ({"logit_bias": {VOCAB: 1.0}}, r"logit_bias: id\[0\] is 512"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias values must lie"),
        ({"logit_bias": {1: 101.0}}, "logit_bias values must lie"),
        ({"min_tokens": 7}, r"min_tokens must lie in 0…max_tokens \(6\), not 7"),
        ({"min_tokens": -1}, "min_tokens must lie"),
        ({"prompt_logprobs": 21}, r"prompt_logprobs must lie in 0…20"),
        ({"prompt_logprobs": -1}, r"prompt_logprobs must lie in 0…20"),
    ],
)
async def test_bad_values_name_their_field(model: Path, fields: dict[str, Any], words: str) -> None:
    async with served(model) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await cluster.completes(ask([1, 2, 3], **fields))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_children_wait_for_room_together_and_end_on_demand(model: Path) -> None:
    """A pool that holds little more than one request of four answers serves eight of them in turn."""
    num_blocks = 4 * (-(-(40 + 19) // 8) + 3 * (-(-(40 + 19) // 8) - 40 // 8)) + 8
    requests = [ask(list(range(i, i + 40)), "full", n=4, temperature=1.0, seed=i, max_tokens=20) for i in range(8)]
    expected = [[list(result.token_ids) for result in local(model, [as_local(r, c) for c in range(4)])] for r in requests]
    async with served(model, num_blocks=num_blocks, min_request_tokens=16) as cluster:
        assert await asyncio.gather(*(ids_of(cluster, request) for request in requests)) == expected
        with pytest.raises(grpc.aio.AioRpcError, match=r"set max_tokens to at most \d+") as caught:
            await cluster.completes(ask(list(range(40)), "full", n=9, max_tokens=20))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await cluster.all_free()


async def test_decode_ends_single_children_when_told(model: Path) -> None:
    """Before the prompt has run, while all run, the first one, the last one, unknown ones; each gets its own end."""
    prompt = tuple(range(60, 83))
    whole = local(model, [as_local(ask(prompt, "speed:2", temperature=1.0, max_tokens=200), child) for child in range(3)])
    for early in (True, False):
        async with served(model, token_budget=8) as cluster:
            end, prefill = cluster.decode_ends[0], Endpoint(cluster.prefill[0].address)
            request = decode_request(Ask(prompt, "speed:2", max_tokens=200, temperature=1.0))
            request.num_children = 3
            call = end.decode.Decode(request)
            events = aiter(call)
            reserved = (await anext(events)).reserved

            async def tell(*indexes: int) -> None:
                await end.decode.EndChildren(pb.EndChildrenRequest(attempt_id=reserved.attempt_id, indexes=indexes))  # noqa: B023

            if early:
                await tell(0, 7)
            running = asyncio.ensure_future(prefill.prefill.Prefill(prefill_request(Ask(prompt, "speed:2"), reserved)))
            got: dict[int, list[int]] = {0: [], 1: [], 2: []}
            ends: dict[int, str] = {}
            told = early
            async for event in events:
                if event.HasField("finished"):
                    ends[event.finished.index] = event.finished.finish_reason
                else:
                    got[event.tokens.index] += event.tokens.token_ids
                if not told and min(map(len, got.values())) > 5:
                    told = True
                    await tell(0)
                if 0 in ends and len(got[1]) > 12 and 1 not in ends:
                    await tell(1, 1)
            await running
            await end.decode.EndChildren(pb.EndChildrenRequest(attempt_id="unknown", indexes=[0]))
            assert ends == {0: "abort", 1: "abort", 2: "length"} and len(got[2]) == 200
            assert bool(got[0]) is not early and 12 < len(got[1]) < 200
            for child, token_ids in got.items():
                assert tuple(token_ids) == whole[child].token_ids[: len(token_ids)]
            await prefill.close()
