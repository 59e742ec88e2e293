"""Every sampling parameter arrives at decode alike through gRPC and HTTP."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from shoal.model_files import load_tokenizer, open_model
from shoal.pb.internal.v1 import worker_pb2
from shoal.pb.v1 import shoal_pb2
from tests.fakes.cluster import Cluster

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BASE: dict[str, Any] = {"temperature": 0, "seed": 1, "max_tokens": 8}


def structured(**form: Any) -> dict[str, Any]:
    return {"structured_outputs": form}


def format_of(**form: Any) -> dict[str, Any]:
    return {"response_format": form}


# parameter: as gRPC has it, as HTTP has it (None: alike)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "temperature": ({"temperature": 0.5}, None),
    "top_p": ({"temperature": 1.0, "top_p": 0.25}, None),
    "top_k": ({"temperature": 1.0, "top_k": 5}, None),
    "min_p": ({"temperature": 1.0, "min_p": 0.125}, None),
    "max_tokens": ({"max_tokens": 3}, None),
    "min_tokens": ({"min_tokens": 2}, None),
    "stop": ({"stop": [" swim", "zebra"]}, None),
    "include_stop_str_in_output": ({"stop": [" swim"], "include_stop_str_in_output": True}, None),
    "stop_token_ids": ({"stop_token_ids": [77, 78]}, None),
    "ignore_eos": ({"ignore_eos": True}, None),
    "seed": ({"seed": 1 << 63}, None),
    "n": ({"n": 2}, None),
    "repetition_penalty": ({"repetition_penalty": 1.5}, None),
    "presence_penalty": ({"presence_penalty": -0.5}, None),
    "frequency_penalty": ({"frequency_penalty": 0.75}, None),
    "logit_bias": ({"logit_bias": {5: -1.5, 7: 100.0}}, {"logit_bias": {"5": -1.5, "7": 100}}),
    "logprobs": ({"logprobs": 2}, None),
    "prompt_logprobs": ({"logprobs": 1, "prompt_logprobs": 1}, {"logprobs": 1, "echo": True}),
    "json_schema": ({"json_schema": json.dumps(SCHEMA, separators=(",", ":"))}, structured(json=SCHEMA)),
    "regex": ({"regex": "[ab]+"}, structured(regex="[ab]+")),
    "grammar": ({"grammar": 'start: "a"'}, structured(grammar='start: "a"')),
    "json_object": ({"json_object": True}, format_of(type="json_object")),
    "choice": ({"choice": shoal_pb2.ChoiceConstraint(choices=["ä", "b"])}, structured(choice=["ä", "b"])),
}
pytestmark = pytest.mark.asyncio(loop_scope="module")
ABOUT_TEXT = {"stop", "include_stop_str_in_output"}  # the router's own work: decode hears nothing of them


@pytest.fixture(scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as cluster:
        cluster.decode[0].script = load_tokenizer(open_model("smollm2-135m")).encode("Fish swim in shoals, they say. And")
        yield cluster


async def over_grpc(cluster: Cluster, sampling: dict[str, Any]) -> tuple[worker_pb2.DecodeRequest, list[str]]:
    params = shoal_pb2.SamplingParams(**(BASE | sampling))
    replies = await cluster.replies(shoal_pb2.GenerateRequest(text="Why", sampling_params=params))
    completes = sorted((reply.complete for reply in replies), key=lambda complete: complete.index)
    return seen(cluster), [f"{complete.text}|{complete.finish_reason}" for complete in completes]


async def over_http(cluster: Cluster, fields: dict[str, Any]) -> tuple[worker_pb2.DecodeRequest, list[str]]:
    body = BASE | {"model": "smollm2-135m", "prompt": "Why"} | fields
    async with httpx2.AsyncClient(base_url=cluster.http, timeout=30) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    prompt = "Why" if "echo" in fields else ""
    choices = answer.json()["choices"]
    return seen(cluster), [f"{choice['text'].removeprefix(prompt)}|{choice['finish_reason']}" for choice in choices]


def seen(cluster: Cluster) -> worker_pb2.DecodeRequest:
    """What decode was asked last."""
    message = worker_pb2.DecodeRequest()
    message.CopyFrom(cluster.decode[0].seen[-1])
    message.request_id, message.age_s = "", 0.0
    return message


@pytest.mark.parametrize("name", CASES)
async def test_a_parameter_arrives_alike_through_both_doors(cluster: Cluster, name: str) -> None:
    as_grpc, as_http = CASES[name]
    plain, plain_texts = await over_grpc(cluster, {})
    asked, texts = await over_grpc(cluster, as_grpc)
    assert await over_http(cluster, as_grpc if as_http is None else as_http) == (asked, texts)
    assert (asked, texts) != (plain, plain_texts)  # it has an effect at all
    assert name in ABOUT_TEXT or asked != plain
    assert name not in ABOUT_TEXT or texts != plain_texts


async def test_what_is_not_given_is_the_same_through_both_doors_but_for_the_temperature(cluster: Cluster) -> None:
    params = shoal_pb2.SamplingParams(seed=1, temperature=1.0)
    await cluster.replies(shoal_pb2.GenerateRequest(text="Why", sampling_params=params))
    asked = seen(cluster)
    async with httpx2.AsyncClient(base_url=cluster.http, timeout=30) as client:
        assert (await client.post("/v1/completions", json={"prompt": "Why", "seed": 1, "max_tokens": None})).status_code == 200
    assert seen(cluster) == asked
    await cluster.replies(shoal_pb2.GenerateRequest(text="Why"))
    assert seen(cluster).sampling.temperature == 0.0
