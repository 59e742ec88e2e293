"""One answer to one request: streamed, whole, alone, in a crowd, on any pair of worker processes, or in a single process."""

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shoal.config.router import RouterConfig
from shoal.config.worker import Pool
from shoal.constraints import ConstraintCompiler
from shoal.engine.local import LocalRequest
from shoal.model_files import load_tokenizer, open_model, write_random_model
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.router.app import Router
from shoal.router.sampling import read_constraint
from shoal.router.text import PromptEncoder
from shoal.rpc import open_channel
from shoal.visibility import Visibility
from tests.e2e.harness import MIXED, make_config, processes
from tests.e2e.served import ask, local, served
from tests.e2e.test_served_sampling import as_local, random_sampling
from tests.fakes.workers import until

VOCAB, EOS = 512, 2
WORDS = ("Fish", "swim", "日本", "👩‍👩‍👧", "in", "shoals", "ä")
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "[a-z]{1,9}( [a-z]{1,4}){0,3}"},
    {"json_schema": json.dumps({"type": "array", "items": {"enum": ["cod", "日本"]}, "minItems": 1, "maxItems": 4})},
    {"choice": shoal_pb2.ChoiceConstraint(choices=["yes", "no 👍"])},
    {"grammar": 'start: ("ab" | "ü"){1,12}'},
]


@dataclass
class Front:
    """A router over two prefill and two decode workers, each a process of its own; the decode workers step differently."""

    model: Path
    stub: shoal_pb2_grpc.ShoalStub

    async def replies(self, request: shoal_pb2.GenerateRequest) -> list[shoal_pb2.GenerateResponse]:
        return [reply async for reply in self.stub.Generate(request)]

    async def completes(self, request: shoal_pb2.GenerateRequest) -> list[shoal_pb2.GenerateComplete]:
        """One for each answer, in their order; of a stream, after its deltas have been held against them."""
        replies = await self.replies(request)
        completes = sorted((reply.complete for reply in replies if reply.HasField("complete")), key=lambda c: c.index)
        chunks = [reply.chunk for reply in replies if reply.HasField("chunk")]
        assert bool(chunks) is request.stream
        for complete in completes if request.stream else ():
            own = [chunk for chunk in chunks if chunk.index == complete.index]
            assert "".join(chunk.text for chunk in own) == complete.text
            assert [token_id for chunk in own for token_id in chunk.token_ids] == list(complete.output_ids)
            assert all("\ufffd" not in chunk.text for chunk in own) or "\ufffd" in complete.text
        return completes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
async def front(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    configs = [make_config(Pool.PREFILL, model, f"prefill-{index}", token_budget=24 + 40 * index) for index in range(2)]
    configs += [
        make_config(Pool.DECODE, model, f"decode-{i}", token_budget=[9, 64][i], max_running_requests=[3, 32][i]) for i in range(2)
    ]
    async with processes(tmp_path_factory.mktemp("workers"), *configs) as workers:
        addresses = tuple(f"{worker.pool}={worker.endpoint.address}" for worker in workers)
        visibilities = tuple(Visibility.parse(text) for text in MIXED)
        router = Router(
            RouterConfig(str(model), listen="127.0.0.1:0", workers=addresses, visibilities=visibilities, local_prefill_tokens=20)
        )
        async with router, open_channel(str(await router.start())) as channel:
            await until(lambda: sum(worker.state == "ready" for worker in router.registry.workers) == 4, timeout_s=20)
            yield Front(model, shoal_pb2_grpc.ShoalStub(channel))
            for worker in workers:
                await worker.endpoint.idle(worker.pool)


pytestmark = pytest.mark.asyncio(loop_scope="module")


def random_request(rng: random.Random, index: int) -> shoal_pb2.GenerateRequest:
    """Any prompt, visibility and parameters; every second one may end by its text, every third one is constrained."""
    sampling = random_sampling(rng) | {"max_tokens": rng.randint(1, 40)}
    sampling["min_tokens"] = rng.choice([0, 0, min(3, sampling["max_tokens"])])
    if index % 2:
        sampling |= {
            "stop": rng.sample(["e", "th", "an", " s", "in", "日", "er"], 3),
            "include_stop_str_in_output": rng.random() < 0.4,
        }
        del sampling["stop"][rng.randint(1, 3) :]
    if index % 3 == 0:
        sampling |= rng.choice(CONSTRAINTS) | {"stop_token_ids": [], "ignore_eos": False, "max_tokens": 60}
    if index % 5 == 0:
        sampling["n"] = 3
    request = shoal_pb2.GenerateRequest(
        visibility=MIXED[index % len(MIXED)], sampling_params=shoal_pb2.SamplingParams(**sampling)
    )
    match index % 4:
        case 0:
            request.text = " ".join(rng.choices(WORDS, k=rng.randint(1, 9)))
        case 1:
            request.chat.messages.add(role="user", content=" ".join(rng.choices(WORDS, k=rng.randint(1, 6))))
        case _:
            request.tokenized.input_ids.extend(rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 17, 40])))
    return request


def in_one_process(model: Path, requests: Sequence[shoal_pb2.GenerateRequest]) -> Iterator[list[tuple[list[int], str]]]:
    """Ids and text of every answer to each request, by LocalEngine and a reading of stop strings of this test's own."""
    files = open_model(str(model))
    tokenizer = load_tokenizer(files)
    encoder = PromptEncoder(tokenizer)
    compiler = ConstraintCompiler(lambda: tokenizer, files.config.shape.vocab_size, files.config.eos_token_ids)
    children: list[LocalRequest] = []
    for request in requests:
        alike = shoal_pb2.GenerateRequest()
        alike.CopyFrom(request)
        visibility = Visibility.parse(request.visibility)
        if not request.HasField("tokenized"):
            chat = [{"role": message.role, "content": message.content} for message in request.chat.messages]
            prompt = encoder.encode_chat(chat) if chat else encoder.encode_text(request.text)
            alike.tokenized.input_ids.extend(prompt.token_ids)
            if visibility.kind == "speed":
                visibility = visibility.resolve(4, prompt.boundary_tokens)
        for child in range(request.sampling_params.n or 1):
            own = as_local(alike, child)
            sampling = replace(own.sampling, constraint=read_constraint(request.sampling_params))
            children.append(replace(own, visibility=visibility, sampling=sampling))
    results = iter(local(model, children, token_budget=31, make_constraint=compiler.make))  # type: ignore[arg-type]
    for request in requests:
        yield [
            read(list(next(results).token_ids), request.sampling_params, tokenizer.decode)
            for _ in range(request.sampling_params.n or 1)
        ]


def read(ids: list[int], sampling: shoal_pb2.SamplingParams, decode: Any) -> tuple[list[int], str]:
    """Cut where a reader, token by token, would find the first stop string that ends after min_tokens."""
    stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}

    def text_of(count: int) -> str:
        shown = ids[:count]
        if shown and shown[-1] in stop_ids and not sampling.include_stop_str_in_output:
            shown = shown[:-1]
        text: str = decode(shown)
        for _ in range(3):
            text = text.removesuffix("\ufffd")
        return text

    for count in range(sampling.min_tokens + 1, len(ids) + 1):
        before, text = len(text_of(count - 1)), text_of(count)
        for end in range(before + 1, len(text) + 1):
            found = [stop for stop in sampling.stop if text[:end].endswith(stop)]
            if found:
                cut = 0 if sampling.include_stop_str_in_output else len(max(found, key=len))
                return ids[:count], text[: end - cut]
    return ids, text_of(len(ids))


async def test_random_requests_have_one_answer(front: Front) -> None:
    rng = random.Random(2026)
    requests = [random_request(rng, index) for index in range(48)]
    expected = list(in_one_process(front.model, requests))
    for request in requests:
        request.stream = rng.random() < 0.5
    crowd = await asyncio.gather(*(front.completes(request) for request in requests))
    for request, completes, answers in zip(requests, crowd, expected, strict=True):
        assert [(list(c.output_ids), c.text) for c in completes] == answers, request
        assert [c.completion_tokens for c in completes] == [len(ids) for ids, _ in answers]
    for request, answers in list(zip(requests, expected, strict=True))[::3]:
        request.stream = not request.stream
        completes = await front.completes(request)  # alone, and through the other kind of reply
        assert [(list(c.output_ids), c.text) for c in completes] == answers, request
    ends = {complete.WhichOneof("matched_stop") for completes in crowd for complete in completes}
    assert ends == {None, "matched_token_id", "matched_stop_str"}  # each kind of end occurs


async def test_a_seed_gives_the_same_answer_on_any_pair_and_in_any_batch(front: Front) -> None:
    request = ask([3 + i for i in range(30)], "speed:2", temperature=1.1, top_p=0.95, seed=77, max_tokens=24)
    [first] = await front.completes(request)
    pairs: set[tuple[str, str]] = set()
    for turn, size in enumerate((0, 1, 4, 9) * 8):
        request.cache_salt = str(turn)  # nothing is cached: every answer crosses from a prefill worker
        crowd = [front.completes(ask([9 + i] * 20, MIXED[i % 7], temperature=0.7, seed=i, max_tokens=20)) for i in range(size)]
        done, *_ = await asyncio.gather(front.completes(request), *crowd)
        assert done[0].output_ids == first.output_ids
        pairs.add((done[0].transfer.prefill_worker, done[0].transfer.decode_worker))
        if len(pairs) == 4 and size == 9:
            break
    assert len(pairs) == 4
    other = shoal_pb2.GenerateRequest()
    other.CopyFrom(request)
    other.sampling_params.seed = 78
    assert (await front.completes(other))[0].output_ids != first.output_ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["日本語👩‍👩‍👧🏳️‍🌈 ok", "naïve → Zürich 𝒳"])
async def test_characters_spread_over_tokens_come_whole(front: Front, text: str, stream: bool) -> None:
    """A constraint makes the model say it; the vocabulary has no such characters, so each comes in bytes."""
    said = {"choice": shoal_pb2.ChoiceConstraint(choices=[text])}
    for visibility in ("full", "speed:2", "pop:2"):
        request = ask([5, 6, 7] * 5, visibility, stream=stream, ignore_eos=False, max_tokens=100, **said)
        [done] = await front.completes(request)
        assert (done.text, done.finish_reason) == (text, "stop") and done.completion_tokens > len(text)
    for cut in range(1, done.completion_tokens):
        request.sampling_params.max_tokens = cut
        [part] = await front.completes(request)
        assert text.startswith(part.text) and "\ufffd" not in part.text
    stop = text[2:4]  # over tokens, and within bytes of them
    [stopped] = await front.completes(ask([5, 6, 7] * 5, stream=stream, max_tokens=100, stop=[stop, "zebra"], **said))
    assert (stopped.text, stopped.matched_stop_str) == (text[:2], stop)


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_end_where_their_text_says(front: Front, stream: bool) -> None:
    said: dict[str, Any] = {"choice": shoal_pb2.ChoiceConstraint(choices=["hello world"]), "stream": stream}
    tokenizer = load_tokenizer(open_model(str(front.model)))
    prompt = tokenizer.encode("say: xy")
    [whole] = await front.completes(ask(prompt, ignore_eos=False, max_tokens=50, **said))
    first = tokenizer.decode(list(whole.output_ids)[:1])
    assert whole.text == "hello world" and first in ("h", "he")
    [end] = await front.completes(ask(prompt, max_tokens=50, stop=[first], **said))  # the first token ends a stop string
    assert (end.text, end.completion_tokens, end.matched_stop_str) == ("", 1, first)
    [shown] = await front.completes(ask(prompt, max_tokens=50, stop=[first], include_stop_str_in_output=True, **said))
    assert (shown.text, shown.completion_tokens) == (first, 1)
    [tail] = await front.completes(ask(prompt, ignore_eos=False, max_tokens=50, stop=["y" + first, "xy", "y"], **said))
    assert (tail.text, tail.finish_reason, tail.matched_token_id) == ("hello world", "stop", EOS)  # the prompt's tail is no match
    free = (await front.completes(ask(prompt, "speed:2", max_tokens=50)))[0]
    [stop_id] = await front.completes(
        ask(prompt, max_tokens=50, stop_token_ids=[free.output_ids[0]], logit_bias={free.output_ids[0]: 100.0})
    )
    assert (stop_id.text, list(stop_id.output_ids), stop_id.matched_token_id) == ("", [free.output_ids[0]], free.output_ids[0])
    [eos] = await front.completes(ask(prompt, ignore_eos=False, max_tokens=50, logit_bias={EOS: 100.0}, stream=stream))
    assert (eos.text, list(eos.output_ids), eos.finish_reason, eos.matched_token_id) == ("", [EOS], "stop", EOS)
    number = len(tokenizer.encode("hello w"))
    [late] = await front.completes(ask(prompt, max_tokens=50, min_tokens=number, stop=["l", "wor"], **said))
    assert (late.text, late.matched_stop_str) in (
        ("hello ", "wor"),
        ("hello wor", "l"),
    )  # "wor" begins before min_tokens, and counts


async def test_the_first_delta_waits_for_nothing_but_prefill_and_handoff(model: Path) -> None:
    """Decode may take no second step, and the router may gather for minutes, before the client has the first token."""
    async with served(model, router={"flush_s": 300.0, "flush_tokens": 1000}) as cluster:
        loaded, first_seen = cluster.decode[0]._loaded, threading.Event()
        assert loaded is not None
        events: list[str] = []
        execute, num_draws = loaded.steps.execute, 0

        def gated(step: Any) -> Any:
            nonlocal num_draws
            if any(row.draws for row in step.rows):
                num_draws += 1
                if num_draws > 1 and not first_seen.wait(20):
                    raise TimeoutError("the first delta did not come before the second step")
                events.append(f"step {num_draws}")
            return execute(step)

        loaded.steps.execute = gated  # type: ignore[method-assign]
        async for reply in cluster.stub.Generate(ask([8] * 40, "speed:2", max_tokens=5, stream=True)):
            if reply.HasField("chunk"):
                events.append(f"delta of {len(reply.chunk.token_ids)}")
                first_seen.set()
        assert events == ["step 1", "delta of 1", "step 2", "step 3", "step 4", "step 5", "delta of 4"]
        timings = reply.complete.timings
        parts = (timings.tokenize_ms, timings.reserve_ms, timings.prefill_ms, timings.transfer_ms, timings.first_step_ms)
        assert sum(parts) == pytest.approx(timings.ttft_ms, abs=0.5) and timings.prefill_ms > 0
