"""/v1/completions, /tokenize and /detokenize with real HTTP clients, over scripted workers."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from shoal.model_files import load_tokenizer, open_model
from tests.fakes.cluster import Cluster

TEXT = "Fish turn together, 日本語."
TOKENIZER = load_tokenizer(open_model("smollm2-135m"))
IDS = [*TOKENIZER.encode(TEXT), 2]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as c:
        c.decode[0].script = IDS
        yield c


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=cluster.http + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def ask(**fields: Any) -> Any:
    return {"model": "smollm2-135m", "prompt": "Once upon", **fields}


@pytest.mark.parametrize(
    ("prompt", "num_choices", "num_prompt_tokens"),
    [("Once upon", 1, 2), (["Once upon", "a"], 2, 3), ([10, 11, 12], 1, 3), ([[10], [11, 12]], 2, 3), (["a"] * 20, 20, 20)],
)
async def test_prompts_of_every_shape(
    client: openai.AsyncOpenAI, cluster: Cluster, prompt: Any, num_choices: int, num_prompt_tokens: int
) -> None:
    answer = await client.completions.create(**ask(prompt=prompt))
    assert [choice.index for choice in answer.choices] == list(range(num_choices))
    assert all(choice.text == TEXT and choice.finish_reason == "stop" for choice in answer.choices)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage is not None and answer.usage.prompt_tokens == num_prompt_tokens
    assert answer.usage.completion_tokens == num_choices * len(IDS)
    extra = answer.choices[-1].model_extra or {}
    assert ("shoal" in extra) is (num_choices > 1) and answer.model_extra["shoal"]["seed"] >= 0  # type: ignore[index]
    if num_choices == 20:
        assert len(cluster.decode[0].seen) == 20


async def test_a_stream_of_two_prompts(client: openai.AsyncOpenAI) -> None:
    texts, reasons = {0: "", 1: ""}, {}
    stream: Any = await client.completions.create(**ask(prompt=["a", "b"], stream=True, stream_options={"include_usage": True}))
    usages = []
    async for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
                assert chunk.model_extra["shoal"]["visibility"] == "full:boundary=1"
    assert texts == {0: TEXT, 1: TEXT} and reasons == {0: "stop", 1: "stop"}
    assert len(usages) == 1 and usages[0].completion_tokens == 2 * len(IDS) and usages[0].prompt_tokens == 2


async def test_logprobs_are_parallel_lists_with_offsets_into_the_text(client: openai.AsyncOpenAI) -> None:
    [choice] = (await client.completions.create(**ask(logprobs=1))).choices
    lists = choice.logprobs
    assert lists is not None and lists.tokens is not None and lists.text_offset is not None
    assert (
        len(lists.tokens)
        == len(lists.text_offset)
        == len(lists.token_logprobs or [])
        == len(lists.top_logprobs or [])
        == len(IDS)
    )
    for token, offset in zip(lists.tokens, lists.text_offset, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert TEXT[offset : offset + len(token)] == token
    streamed: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    async for chunk in await client.completions.create(**ask(logprobs=1, stream=True)):
        if chunk.choices[0].logprobs:
            for name in streamed:
                streamed[name] += getattr(chunk.choices[0].logprobs, name)
    assert streamed == {name: getattr(lists, name) for name in streamed}


async def test_echo_repeats_the_prompt_once(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    whole = await client.completions.create(**ask(echo=True))
    assert whole.choices[0].text == "Once upon" + TEXT
    ids = await client.completions.create(**ask(prompt=TOKENIZER.encode("Once upon"), echo=True))
    assert ids.choices[0].text == "Once upon" + TEXT
    streamed = ""
    async for chunk in await client.completions.create(**ask(echo=True, stream=True)):
        streamed += chunk.choices[0].text
    assert streamed == "Once upon" + TEXT
    only = await client.completions.create(**ask(echo=True, max_tokens=0))
    assert only.choices[0].text == "Once upon" and only.choices[0].finish_reason == "length"
    assert only.usage is not None and only.usage.completion_tokens == 0 and cluster.decode[0].seen[-1].sampling.max_tokens == 1


async def test_tokenize_and_detokenize(cluster: Cluster) -> None:
    async with httpx2.AsyncClient(base_url=cluster.http) as http:
        answer = (await http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})).json()
        assert answer["tokens"] == IDS[:-1] and answer["count"] == len(IDS) - 1 and answer["max_model_len"] == 8192
        assert answer["token_strs"][0] == "Fish" and len(answer["token_strs"]) == answer["count"]
        back = await http.post("/detokenize", json={"model": "smollm2-135m", "tokens": answer["tokens"]})
        assert back.json() == {"prompt": TEXT}
        chat = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})).json()
        text = (await http.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
            ("/tokenize", {"prompt": 3}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "add_special_tokens"),
            ("/detokenize", {"tokens": [99999999]}, "tokens"),
            ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ):
            refused = await http.post(path, json=body)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param, body
        assert (await http.post("/detokenize", json={"model": "other", "tokens": []})).status_code == 404
