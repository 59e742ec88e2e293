"""Prompts with images through router and workers over real gRPC, held to one process that sees the same images."""

import asyncio
import base64
import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from shoal.engine.local import LocalRequest
from shoal.model_files import Prompt, PromptEncoder, load_tokenizer, open_model, write_random_model
from shoal.pb.v1 import shoal_pb2
from shoal.placement.arithmetic import wire_bytes
from shoal.types import DType, SamplingParams
from shoal.visibility import Visibility
from tests.e2e.served import Served, local, served
from tests.fakes.images import picture, promised
from tests.fakes.workers import until

FAMILIES = ("gemma3", "qwen3_vl")
VISIBILITIES = ("full", "speed:2", "speed:3:anchors=4", "pop:2", "pop:3:late")
A, B, C = picture(40, 24, seed=1), picture(30, 60, seed=2, form="JPEG"), picture(24, 24, seed=3, form="WEBP", lossless=True)
Content = Sequence[str | bytes]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    window = {"sliding_window": 24} if request.param == "gemma3" else {}
    return write_random_model(tmp_path_factory.mktemp(request.param), architecture=request.param, **window)


@pytest.fixture(scope="module", params=FAMILIES)
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows beyond every prompt: of a shorter one decode holds the last tokens alone, which never grow."""
    window = {"sliding_window": 200} if request.param == "gemma3" else {}
    return write_random_model(tmp_path_factory.mktemp(request.param), architecture=request.param, **window)


def encoder(model: Path) -> PromptEncoder:
    files = open_model(str(model))
    return PromptEncoder(load_tokenizer(files), files.vision)


def told(content: Content) -> Prompt | Any:
    return [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image"} for each in content]


def prompt_of(model: Path, content: Content) -> Prompt:
    images = [each for each in content if isinstance(each, bytes)]
    return encoder(model).encode_chat([{"role": "user", "content": told(content)}], images=images)


def ask(content: Content, visibility: str = "full", **sampling: Any) -> shoal_pb2.GenerateRequest:
    parts = [
        shoal_pb2.ContentPart(text=each) if isinstance(each, str) else shoal_pb2.ContentPart(image=shoal_pb2.Image(data=each))
        for each in content
    ]
    params = shoal_pb2.SamplingParams(**({"ignore_eos": True, "max_tokens": 8} | sampling))
    chat = shoal_pb2.ChatInput(messages=[shoal_pb2.ChatMessage(role="user", content_parts=parts)])
    return shoal_pb2.GenerateRequest(chat=chat, visibility=visibility, sampling_params=params)


def alone(model: Path, prompt: Prompt, done: shoal_pb2.GenerateComplete, max_tokens: int = 8) -> tuple[int, ...]:
    """What one process answers under the visibility that the answer names."""
    sampling = SamplingParams(max_tokens, ignore_eos=True)
    request = LocalRequest(prompt.token_ids, Visibility.parse(done.visibility), sampling, images=prompt.images)
    return local(model, [request])[0].token_ids


async def all_free(s: Served) -> None:
    await s.all_free()
    await until(lambda: all(not worker.load().num_used_blocks for worker in s.prefill), timeout_s=10)


@pytest.mark.parametrize("token_budget", [64, 20])
async def test_answers_are_those_of_one_process_under_every_visibility(model: Path, token_budget: int) -> None:
    """Through both doors, many at once; bytes on the wire are the plan's."""
    contents: list[Content] = [
        ("What do you see here and there?", A, B, "Compare."),
        ("Before all that:", C, "between", A, "behind " * 8),
        ("No picture at all, just a few words.",),
    ]
    shape = open_model(str(model)).config.shape
    async with served(model, 1, 2, router={"http_listen": "127.0.0.1:0"}, token_budget=token_budget, prefix_cache=False) as s:
        asks = [(content, visibility) for content in contents for visibility in VISIBILITIES]
        answers = await asyncio.gather(*(s.completes(ask(content, visibility)) for content, visibility in asks))
        for (content, visibility), [done] in zip(asks, answers, strict=True):
            prompt = prompt_of(model, content)
            assert done.prompt_tokens == len(prompt.token_ids), visibility
            assert done.image_tokens == sum(image.span.num_tokens for image in prompt.images)
            assert tuple(done.output_ids) == alone(model, prompt, done), (visibility, content)
            reason = "images" if prompt.images else "long"
            assert (done.transfer.prefill_at, done.transfer.prefill_reason) == ("prefill_worker", reason)
            resolved = Visibility.parse(done.visibility).resolve(shape.num_layers)
            expected = wire_bytes(shape, DType.FLOAT32, resolved, done.prompt_tokens, 0)
            assert done.transfer.payload_bytes == done.transfer.plan_bytes == expected
        await same_over_http(s, contents[0], answers[1][0])
        await all_free(s)


async def same_over_http(s: Served, content: Content, done: shoal_pb2.GenerateComplete) -> None:
    parts = [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(each).decode()}"}}
        for each in content
    ]
    body = {
        "messages": [{"role": "user", "content": parts}], "visibility": "speed:2", "temperature": 0, "max_tokens": 8,
        "ignore_eos": True,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=f"http://{s.router.http_address}", timeout=60) as web:
        answer = (await web.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == done.text
    assert answer["usage"]["prompt_tokens"] == done.prompt_tokens and answer["shoal"]["image_tokens"] == done.image_tokens


async def test_texts_ids_scores_and_children(model: Path) -> None:
    placeholder = (files := open_model(str(model))).vision.placeholder  # type: ignore[union-attr]
    text = f"One {placeholder} and two {placeholder}, what are they?"
    given = [shoal_pb2.Image(data=each) for each in (A, C)]
    prompt = encoder(model).encode_text(text, [A, C])
    sampling = shoal_pb2.SamplingParams(ignore_eos=True, max_tokens=6)
    async with served(model) as s:
        [done] = await s.completes(
            shoal_pb2.GenerateRequest(text=text, images=given, visibility="pop:2", sampling_params=sampling)
        )
        assert tuple(done.output_ids) == alone(model, prompt, done, 6)
        ids = [9, 8, files.vision.placeholder_id, 10, 11, 12]  # type: ignore[union-attr]
        [done] = await s.completes(
            shoal_pb2.GenerateRequest(
                tokenized={"input_ids": ids}, images=given[:1], visibility="speed:2", sampling_params=sampling
            )
        )
        assert tuple(done.output_ids) == alone(model, encoder(model).expand_ids(ids, [A]), done, 6)
        children = await s.completes(ask(("See", A, "!"), "pop:2", n=3, temperature=1.0, seed=5))
        prompt_chat = prompt_of(model, ("See", A, "!"))
        params = SamplingParams(8, temperature=1.0, seed=5, ignore_eos=True)
        request = LocalRequest(prompt_chat.token_ids, Visibility.parse(children[0].visibility), params, images=prompt_chat.images)
        assert [tuple(c.output_ids) for c in children] == [each.token_ids for each in local(model, request.children(3))]
        score = await s.stub.Score(
            shoal_pb2.ScoreRequest(
                text=text, images=given, continuation_tokenized={"input_ids": [20, 21, 22]}, logprobs=1, visibility="speed:2"
            )
        )
        scored = LocalRequest(
            prompt.token_ids, Visibility.parse(score.visibility), SamplingParams(1, num_logprobs=1),
            continuation_ids=(20, 21, 22), images=prompt.images,
        )  # fmt: skip
        expected = [each.logprob for each in local(model, [scored])[0].logprobs]
        assert list(score.logprobs.token_logprobs) == pytest.approx(expected, abs=1e-3)
        await all_free(s)


async def test_cached_prefixes_tell_images_apart(wide: Path) -> None:
    """The same ids with another image share nothing; an image that decode holds need not be seen again."""
    async with served(wide, router={"local_prefill_tokens": 64}) as s:
        for visibility in ("full", "speed:2", "pop:2"):
            first, again = [(await s.completes(ask(("Look at this:", A, "What is it?"), visibility)))[0] for _ in range(2)]
            other = picture(40, 24, seed=9)
            [changed] = await s.completes(ask(("Look at this:", other, "What is it?"), visibility))
            span = prompt_of(wide, ("Look at this:", A, "What is it?")).images[0].span
            assert first.cached_tokens == 0 and again.cached_tokens >= span.stop, visibility
            assert again.transfer.prefill_at in ("", "decode_worker") and first.transfer.prefill_reason == "images"
            assert changed.cached_tokens <= span.start and changed.transfer.prefill_reason == "images"
            assert first.output_ids == again.output_ids
            for data, done in ((A, first), (other, changed)):
                assert tuple(done.output_ids) == alone(wide, prompt_of(wide, ("Look at this:", data, "What is it?")), done)
        await all_free(s)


async def test_an_answer_goes_on_where_a_decode_worker_died(model: Path) -> None:
    async with served(model, 1, 2) as s:
        asked = ask(("What is", B, "?"), "speed:2", max_tokens=150)
        asked.stream = True
        task = asyncio.create_task(s.completes(asked))
        await s.stop(await s.busy_worker())
        [done] = await task
        assert tuple(done.output_ids) == alone(model, prompt_of(model, ("What is", B, "?")), done, 150)
        await all_free(s)


async def test_preempted_requests_see_their_images_again(wide: Path) -> None:
    """Decode has room for little more than one of them at its longest."""
    contents: list[Content] = [("Number", str(index), picture(24, 24, seed=index), "is?") for index in range(8)]
    visibilities = [VISIBILITIES[index % len(VISIBILITIES)] for index in range(8)]
    asks = [ask(content, visibility, max_tokens=80) for content, visibility in zip(contents, visibilities, strict=True)]
    workers = {"preemption": True, "num_blocks": 100, "max_running_requests": 8}
    async with served(wide, decode=[workers]) as s:
        answers = await asyncio.wait_for(asyncio.gather(*map(s.completes, asks)), 90)
        await all_free(s)
    for content, [done] in zip(contents, answers, strict=True):
        assert tuple(done.output_ids) == alone(wide, prompt_of(wide, content), done, 80)
    assert sum(done.num_preemptions for [done] in answers) > 0 and not any(done.num_retries for [done] in answers)


async def test_damaged_images_end_their_own_request_alone(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Headers that the router believes: cut short, promising pixels that are not there, other bytes behind them. No log tells."""
    caplog.set_level(logging.DEBUG)
    bad = [A[:-30], B[: len(B) // 2], promised(6000, 6000), B[:700] + bytes(500), picture(5, 4, form="GIF")[:-20]]
    async with served(model, prefix_cache=False) as s:
        good = ask(("See", A, "!"), "pop:2")
        running = asyncio.create_task(s.completes(good))
        for data in bad:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await s.completes(ask(("See", data, "!"), "pop:2"))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()
            assert len(refused.value.details() or "") < 300
        [before], [after] = await running, await s.completes(good)
        assert before.output_ids == after.output_ids and after.num_retries == 0
        await all_free(s)
    told = "\n".join(str(vars(record)) for record in caplog.records if record.name.startswith("shoal"))
    assert "image_tokens" in told
    for secret in (b"See", A[60:90], B[60:90], b"IHDR"):
        assert repr(secret)[2:-1] not in told and base64.b64encode(secret).decode() not in told


async def test_requests_with_images_that_are_left_free_everything(model: Path) -> None:
    rng = random.Random(3)
    async with served(model) as s:
        for visibility in VISIBILITIES:
            task = asyncio.create_task(s.completes(ask(("See", A, B, C, "!"), visibility, max_tokens=200)))
            await asyncio.sleep(rng.random() * 0.1)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await all_free(s)
