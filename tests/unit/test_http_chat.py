"""/v1/chat/completions and /v1/models with the real openai client, over scripted workers."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from shoal.model_files import load_tokenizer, open_model
from tests.fakes.cluster import Cluster

TEXT = "Fish turn together, 日本語."
ASK: Any = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Why?"}]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = '<tool_call>[{"name": "weather", "arguments": {"city": "Zürich"}}]</tool_call>'


def encode(text: str) -> list[int]:
    return [*load_tokenizer(open_model("smollm2-135m")).encode(text), 2]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as c:
        c.decode[0].script = encode(TEXT)
        yield c


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=cluster.http + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def chunks_of(stream: Any) -> list[ChatCompletionChunk]:
    return [chunk async for chunk in stream]


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def test_a_whole_answer(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    answer = await client.chat.completions.create(**ASK, seed=7, extra_body={"visibility": "speed:22"})
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "smollm2-135m"
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == TEXT and choice.message.tool_calls is None
    assert choice.finish_reason == "stop" and choice.logprobs is None and choice.index == 0
    assert answer.usage is not None and answer.usage.completion_tokens == len(encode(TEXT))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 0
    told = answer.model_extra["shoal"]  # type: ignore[index]
    assert told["visibility"] == "speed:22:boundary=4" and told["seed"] == 7 and told["transfer"]["payload_bytes"] == 2200
    assert told["timings"]["ttft_ms"] > 0 and told["num_retries"] == 0 and told["notices"] == []
    assert told["decode_kv"] == {"layer_tokens": 7, "bytes": 70}
    sent = cluster.decode[0].seen[-1].sampling
    assert sent.temperature == 1.0 and sent.seed == 7  # OpenAI's default, not greedy


async def test_a_stream_adds_up_to_the_whole_answer_and_its_usage_comes_when_asked_for(client: openai.AsyncOpenAI) -> None:
    chunks = await chunks_of(await client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    *body, last, usage = chunks
    assert text_of(chunks) == TEXT and body[0].choices[0].delta.role == "assistant" and len(body) > 1
    assert {chunk.id for chunk in chunks} == {last.id} and all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert last.choices[0].finish_reason == "stop" and [c.choices[0].finish_reason for c in body] == [None] * len(body)
    assert last.model_extra["shoal"]["transfer"]["payload_bytes"] == 3000  # type: ignore[index]
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == len(encode(TEXT))
    assert all(chunk.usage is None for chunk in (*body, last))
    plain = await chunks_of(await client.chat.completions.create(**ASK, stream=True))
    assert text_of(plain) == TEXT and all(chunk.choices and chunk.usage is None for chunk in plain)


async def test_logprobs_name_every_token(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    answer = await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == len(encode(TEXT)) and all(entry.logprob == -0.5 and entry.top_logprobs for entry in content)
    assert b"".join(bytes(entry.bytes or []) for entry in content[:-1]).decode() == TEXT
    assert any(entry.token.startswith("bytes:\\x") for entry in content) and content[-1].token == "<|im_end|>"
    assert cluster.decode[0].seen[-1].sampling.num_logprobs == 2
    chunks = await chunks_of(await client.chat.completions.create(**ASK, logprobs=True, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert all(entry.top_logprobs == [] for entry in streamed)


async def test_every_sampling_field_arrives(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    cluster.decode[0].script = encode("one two STOP three")
    answer = await client.chat.completions.create(
        **ASK, temperature=0.5, top_p=0.25, seed=3, max_completion_tokens=50, stop=["STOP", "x"], user="me", metadata={"a": "b"},
        extra_body={"top_k": 5, "stop_token_ids": [77], "visibility": "pop", "prefill_layers": 20, "cache_salt": "s"},
    )  # fmt: skip
    sent = cluster.decode[0].seen[-1]
    assert (sent.sampling.temperature, sent.sampling.top_p, sent.sampling.top_k) == (0.5, 0.25, 5)
    assert sent.sampling.max_tokens == 50 and 77 in sent.sampling.stop_token_ids and sent.visibility == "pop:20:boundary=1"
    assert answer.choices[0].message.content == "one two " and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == "STOP"  # type: ignore[index]
    await client.chat.completions.create(**ASK, extra_body={"prefill_layers": 22, "top_k": -1, "temperature": None})
    assert cluster.decode[0].seen[-1].visibility == "speed:22:boundary=4" and cluster.decode[0].seen[-1].sampling.top_k == 0


async def test_conversations_of_every_role_reach_the_template(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Thanks", "name": "Ann"},
    ]  # fmt: skip
    await client.chat.completions.create(model="smollm2-135m", messages=messages, tools=TOOLS)
    prompt = load_tokenizer(open_model("smollm2-135m")).decode(cluster.decode[0].seen[-1].prompt_ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nBe brief.") and "<|im_start|>user\nHello there<|im_end|>" in prompt
    assert '<tool_call>[{"name": "weather", "arguments": {"city": "Bern"}}]</tool_call>' in prompt
    assert "<|im_start|>tool\nrain<|im_end|>" in prompt and prompt.count('"parameters"') == 1


async def test_tool_calls_are_parsed_and_streamed(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    cluster.decode[0].script = encode("I look. " + CALL)
    answer = await client.chat.completions.create(**ASK, tools=TOOLS)
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.id.startswith("call_") and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content == "I look."
    cluster.decode[0].delay_s = 0.025  # longer than tokens wait for each other
    chunks = await chunks_of(await client.chat.completions.create(**ASK, tools=TOOLS, stream=True))
    cluster.decode[0].delay_s = 0.0
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [c.function.name for c in calls if c.function and c.function.name] == ["weather"] and len(calls) > 2
    assert all(c.index == 0 for c in calls) and len([c for c in calls if c.id]) == 1
    assert "".join(c.function.arguments or "" for c in calls if c.function) == '{"city": "Zürich"}'
    assert text_of(chunks) == "I look." and chunks[-1].choices[0].finish_reason == "tool_calls"
    silent = await client.chat.completions.create(**ASK, tools=TOOLS, tool_choice="none")
    assert silent.choices[0].message.content == "I look. " + CALL and silent.choices[0].message.tool_calls is None
    without = await client.chat.completions.create(**ASK)
    assert without.choices[0].finish_reason == "stop" and CALL in (without.choices[0].message.content or "")


async def test_one_call_only_when_calls_must_not_be_parallel(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    cluster.decode[0].script = encode(CALL + CALL)
    both = await client.chat.completions.create(**ASK, tools=TOOLS)
    one = await client.chat.completions.create(**ASK, tools=TOOLS, parallel_tool_calls=False)
    assert [len(answer.choices[0].message.tool_calls or []) for answer in (both, one)] == [2, 1]


async def test_models(client: openai.AsyncOpenAI) -> None:
    [model] = (await client.models.list()).data
    assert model.id == "smollm2-135m" and model.owned_by == "shoal"
    assert model.model_extra["shoal"]["visibilities"] == ["full", "speed:22", "pop:20"]  # type: ignore[index]
    assert (await client.models.retrieve("smollm2-135m")).model_extra["max_model_len"] == 8192  # type: ignore[index]
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_the_synchronous_client_works_too(cluster: Cluster) -> None:
    def use() -> str:
        with openai.OpenAI(base_url=cluster.http + "/v1", api_key="none", max_retries=0) as client:
            return "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**ASK, stream=True))

    assert await asyncio.to_thread(use) == TEXT
