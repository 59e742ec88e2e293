"""The real openai client against a real router and workers in processes of their own (a tiny random model)."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from shoal.client import AsyncClient, Message, Sampling
from shoal.config.router import RouterConfig
from shoal.config.worker import Pool
from shoal.model_files import write_random_model
from shoal.router.app import Router
from shoal.visibility import Visibility
from tests.e2e.harness import MIXED, WorkerProcess, make_config, processes
from tests.fakes.workers import until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

MESSAGES: Any = [{"role": "user", "content": "Why do fish swim in shoals?"}]
SCHEMA = {
    "type": "object",
    "properties": {"fish": {"enum": ["cod", "eel"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["fish", "count"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("count_fish", SCHEMA), ("feed", NOTHING))
]


@dataclass
class Cluster:
    """`openai` and `grpc` are clients of one router."""

    router: Router
    workers: list[WorkerProcess]
    openai: openai.AsyncOpenAI
    grpc: AsyncClient

    async def chat(self, **fields: Any) -> Any:
        defaults: dict[str, Any] = {"model": "", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "seed": 1}
        return await self.openai.chat.completions.create(**(defaults | fields))

    async def text(self, **fields: Any) -> Any:
        defaults: dict[str, Any] = {"model": "", "prompt": "Fish swim", "max_tokens": 12, "temperature": 0, "seed": 1}
        return await self.openai.completions.create(**(defaults | fields))

    async def idle(self) -> None:
        for worker in self.workers:
            await worker.endpoint.idle(worker.pool)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("openai")
    model = write_random_model(tmp_path_factory.mktemp("tiny"), max_context=4096)
    configs = [make_config(Pool.PREFILL, model), make_config(Pool.DECODE, model)]
    async with processes(folder, *configs) as workers:
        addresses = tuple(f"{worker.pool}={worker.endpoint.address}" for worker in workers)
        visibilities = tuple(Visibility.parse(text) for text in MIXED)
        config = RouterConfig(
            str(model),
            listen="127.0.0.1:0",
            http_listen="127.0.0.1:0",
            workers=addresses,
            visibilities=visibilities,
            local_prefill_tokens=0,
        )
        async with Router(config) as router:
            address = str(await router.start())
            await until(lambda: router.service.is_serving, timeout_s=20)
            opened = openai.AsyncOpenAI(base_url=f"http://{router.http_address}/v1", api_key="none", max_retries=0)
            async with opened, AsyncClient(address) as client:
                found = Cluster(router, workers, opened, client)
                yield found
                await found.idle()


async def collect(stream: Any) -> tuple[dict[int, str], dict[int, str]]:
    """Texts and finish reasons by choice."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (delta or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons


@pytest.mark.parametrize("visibility", ["full", "speed:2", "pop:2"])
async def test_streamed_whole_and_grpc_answers_are_equal(cluster: Cluster, visibility: str) -> None:
    extra = {"visibility": visibility, "ignore_eos": True}
    whole = await cluster.chat(temperature=0.8, extra_body={**extra, "cache_salt": "whole"})
    texts, reasons = await collect(await cluster.chat(temperature=0.8, extra_body={**extra, "cache_salt": "s"}, stream=True))
    sampling = Sampling(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
    over_grpc = await cluster.grpc.complete([Message("user", MESSAGES[0]["content"])], sampling=sampling, visibility=visibility)
    assert texts == {0: whole.choices[0].message.content} == {0: over_grpc.text} and reasons == {0: "length"}
    assert whole.usage.completion_tokens == 12 and whole.usage.prompt_tokens == over_grpc.prompt_tokens
    told = whole.shoal["transfer"]
    assert told["payload_bytes"] == told["plan_bytes"] == over_grpc.transfer.payload_bytes > 0
    assert whole.shoal["visibility"] == over_grpc.visibility and whole.shoal["seed"] == 1
    assert (told["payload_bytes"] < told["full_depth_bytes"]) is (visibility == "speed:2")


async def test_n_answers_differ_and_repeat_by_seed(cluster: Cluster) -> None:
    ask: dict[str, Any] = dict(n=3, temperature=1.5, extra_body={"ignore_eos": True})
    first, second = await cluster.chat(**ask), await cluster.chat(**ask)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3 and texts == [choice.message.content for choice in second.choices]
    assert first.usage.completion_tokens == 36 and first.choices[2].shoal["transfer"] == first.shoal["transfer"]
    streamed, reasons = await collect(await cluster.chat(**ask, stream=True))
    assert streamed == dict(enumerate(texts)) and reasons == {0: "length", 1: "length", 2: "length"}
    assert (await cluster.chat(**(ask | {"seed": 2}))).choices[0].message.content != texts[0]
    many = await cluster.text(prompt=["one", "two"], **ask)
    assert [choice.index for choice in many.choices] == list(range(6)) and len({c.text for c in many.choices}) == 6


async def test_logprobs_of_both_shapes(cluster: Cluster) -> None:
    chat = await cluster.chat(logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True})
    content = chat.choices[0].logprobs.content
    assert len(content) == 12 and all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)  # greedy: the best was taken
    text = await cluster.text(logprobs=2, extra_body={"ignore_eos": True})
    lists = text.choices[0].logprobs
    assert len(lists.tokens) == 12 and all(2 <= len(top) <= 3 for top in lists.top_logprobs)
    assert all(logprob == max(top.values()) for logprob, top in zip(lists.token_logprobs, lists.top_logprobs, strict=True))


async def test_echo_with_the_prompts_logprobs_under_full_only(cluster: Cluster) -> None:
    answer = await cluster.text(echo=True, logprobs=1, max_tokens=4, n=2, extra_body={"ignore_eos": True})
    prompt = await cluster.grpc.tokenize("Fish swim", raw=True)
    score = await cluster.grpc.score(prompt[:1], prompt[1:], visibility="full")
    for choice in answer.choices:
        lists = choice.logprobs
        assert choice.text.startswith("Fish swim") and len(lists.tokens) == len(prompt) + 4 and lists.token_logprobs[0] is None
        assert sum(lists.token_logprobs[1 : len(prompt)]) == pytest.approx(score.total_logprob, abs=1e-4)
        assert "".join(lists.tokens[: len(prompt)]) == "Fish swim" and lists.text_offset[1] == len(lists.tokens[0])
    streamed: dict[int, list[str]] = {0: [], 1: []}
    ask: dict[str, Any] = dict(echo=True, logprobs=1, max_tokens=4, n=2, extra_body={"ignore_eos": True}, stream=True)
    async for chunk in await cluster.text(**ask):
        if chunk.choices[0].logprobs:
            streamed[chunk.choices[0].index] += chunk.choices[0].logprobs.tokens
    assert streamed == {choice.index: choice.logprobs.tokens for choice in answer.choices}
    only = await cluster.text(echo=True, logprobs=0, max_tokens=0)
    assert only.choices[0].text == "Fish swim" and len(only.choices[0].logprobs.tokens) == len(prompt)
    plain = await cluster.text(echo=True, extra_body={"visibility": "pop:2"})
    assert plain.choices[0].text.startswith("Fish swim")
    with pytest.raises(openai.APIStatusError, match="need visibility full") as caught:
        await cluster.text(echo=True, logprobs=1, extra_body={"visibility": "pop:2"})
    assert caught.value.status_code == 501


async def test_stops_penalties_and_biases(cluster: Cluster) -> None:
    plain = (await cluster.chat(extra_body={"ignore_eos": True})).choices[0].message.content
    stop = plain[4:6]
    stopped = await cluster.chat(stop=stop, extra_body={"ignore_eos": True})
    assert stopped.choices[0].message.content == plain[: plain.index(stop)]
    assert stopped.choices[0].finish_reason == "stop" and stopped.choices[0].stop_reason == stop
    shown = await cluster.chat(stop=[stop], extra_body={"ignore_eos": True, "include_stop_str_in_output": True})
    assert shown.choices[0].message.content == plain[: plain.index(stop)] + stop
    biased = await cluster.chat(logit_bias={"70": 100}, extra_body={"ignore_eos": True})
    assert biased.choices[0].message.content != plain and len(set(biased.choices[0].message.content)) == 1
    punished = await cluster.chat(logit_bias={"70": 20}, presence_penalty=2, frequency_penalty=2, extra_body={"ignore_eos": True})
    assert len(set(punished.choices[0].message.content)) > 1
    ended = await cluster.chat(extra_body={"stop_token_ids": [70], "logit_bias": {"70": 100}, "min_tokens": 3})
    assert ended.usage.completion_tokens == 4 and ended.choices[0].stop_reason == 70


async def test_structured_output(cluster: Cluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "fish", "schema": SCHEMA, "strict": True}}
    for stream in (False, True):
        answer = await cluster.chat(response_format=form, temperature=1.5, max_tokens=200, stream=stream)
        text = (await collect(answer))[0][0] if stream else answer.choices[0].message.content
        found = json.loads(text)
        assert found["fish"] in ("cod", "eel") and 0 <= found["count"] <= 99
    chosen = await cluster.text(max_tokens=60, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert chosen.choices[0].text in ("yes", "no") and chosen.choices[0].finish_reason == "stop"
    matched = await cluster.text(max_tokens=60, temperature=1, extra_body={"structured_outputs": {"regex": "[ab]{3}c"}})
    assert len(matched.choices[0].text) == 4 and matched.choices[0].text.endswith("c")
    for bad in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "fish"}}}},
        {"extra_body": {"structured_outputs": {"regex": "("}}},
    ):
        with pytest.raises(openai.BadRequestError):
            await cluster.chat(**bad)


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_tool_calls(cluster: Cluster, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "count_fish"}}
    for choice in (named, "required"):
        answer = await cluster.chat(tools=TOOLS, tool_choice=choice, temperature=1.0, max_tokens=300, stream=stream)
        calls: list[list[str]] = []
        if stream:
            reason = None
            async for chunk in answer:
                reason = chunk.choices[0].finish_reason or reason
                for call in chunk.choices[0].delta.tool_calls or []:
                    if call.id:
                        calls.append([call.function.name, ""])
                    calls[call.index][1] += call.function.arguments
        else:
            reason = answer.choices[0].finish_reason
            calls = [[call.function.name, call.function.arguments] for call in answer.choices[0].message.tool_calls]
        assert calls and calls[0][0] in ("count_fish", "feed") and (choice == "required" or calls[0][0] == "count_fish")
        if reason != "length":  # a list of calls may go on until max_tokens
            assert reason == "tool_calls"
            assert all(set(json.loads(arguments)) <= {"fish", "count"} for _, arguments in calls)


async def test_tools_that_the_model_may_leave_alone(cluster: Cluster) -> None:
    answer = await cluster.chat(tools=TOOLS)
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].finish_reason in ("stop", "length")
    with_tools = answer.usage.prompt_tokens
    silent = await cluster.chat(tools=TOOLS, tool_choice="none")
    assert with_tools > silent.usage.prompt_tokens == (await cluster.chat()).usage.prompt_tokens


async def test_cancelling_mid_stream_frees_both_workers_at_once(cluster: Cluster) -> None:
    stream = await cluster.chat(stream=True, max_tokens=3000, n=2, extra_body={"ignore_eos": True})
    await anext(aiter(stream))
    decode = next(worker for worker in cluster.workers if worker.pool is Pool.DECODE)
    assert (await decode.endpoint.load(Pool.DECODE)).num_used_blocks > 0
    await stream.close()
    async with asyncio.timeout(2):
        await cluster.idle()


async def test_bad_requests_leave_other_streams_alone(cluster: Cluster) -> None:
    ask: dict[str, Any] = dict(stream=True, max_tokens=60, extra_body={"ignore_eos": True})
    expected = await collect(await cluster.chat(**ask))
    running = [asyncio.create_task(collect(await cluster.chat(**ask))) for _ in range(3)]
    bad: list[tuple[dict[str, Any], int]] = [
        ({"n": 129}, 400), ({"temperature": -1}, 400), ({"max_tokens": 5000}, 400), ({"model": "other"}, 404),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400), ({"stop": ["x"] * 65}, 400), ({"presence_penalty": 3}, 400),
        ({"logit_bias": {"99999": 1}}, 400), ({"extra_body": {"min_p": 2}}, 400),
        ({"extra_body": {"repetition_penalty": 0}}, 400),
        ({"extra_body": {"min_tokens": 50}}, 400), ({"extra_body": {"visibility": "speed:9"}}, 400),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, 400),
    ]  # fmt: skip
    for fields, status in bad:
        with pytest.raises(openai.APIStatusError) as caught:
            await cluster.chat(**fields)
        assert caught.value.status_code == status, fields
        assert caught.value.body["message"] and caught.value.body["type"] == "invalid_request_error"  # type: ignore[index]
    assert [await task for task in running] == [expected] * 3


async def test_twenty_requests_of_one_id(cluster: Cluster) -> None:
    headers = {"x-request-id": "one"}
    asks = [cluster.text(prompt=f"number {i}", extra_body={"ignore_eos": True}, extra_headers=headers) for i in range(20)]
    answers = await asyncio.gather(*asks)
    alone = [await cluster.text(prompt=f"number {i}", extra_body={"ignore_eos": True}) for i in (0, 19)]
    assert {answer.id for answer in answers} == {"cmpl-one"}
    assert [answers[0].choices[0].text, answers[19].choices[0].text] == [answer.choices[0].text for answer in alone]
