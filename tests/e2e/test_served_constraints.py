"""Structured output through router and workers: valid whatever the visibility, refused before any work, resumed where it was."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest

from shoal.model_files import write_random_model
from shoal.pb.v1 import shoal_pb2
from tests.e2e.harness import MIXED
from tests.e2e.served import ask, served

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 4}, "num": {"type": "integer", "minimum": -9, "maximum": 99}},
    "required": ["word", "num"],
    "additionalProperties": False,
}
REGEX = r"[a-z]{1,6}(-[0-9]{1,3}){2}"
LARK = 'start: (WORD " "){1,3} "!"\nWORD: /[äöü]{1,3}/'
CHOICES = ["yes", "no", "vielleicht 日本"]
CONSTRAINTS: list[dict[str, Any]] = [
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": REGEX},
    {"grammar": LARK},
    {"choice": shoal_pb2.ChoiceConstraint(choices=CHOICES)},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"), max_context=1024)


def bound(prompt: list[int], constraint: dict[str, Any], visibility: str, **sampling: Any) -> shoal_pb2.GenerateRequest:
    return ask(prompt, visibility, **({"ignore_eos": False, "max_tokens": 300} | sampling | constraint))


def check(constraint: dict[str, Any], text: str) -> None:
    match next(iter(constraint)):
        case "json_schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        case "regex":
            assert re.fullmatch(REGEX, text), text
        case "grammar":
            assert re.fullmatch("([äöü]{1,3} ){1,3}!", text), text
        case _:
            assert text in CHOICES


async def test_every_answer_is_valid_beside_others_that_are_as_ever(model: Path) -> None:
    free = [ask([20 + i] * 9, MIXED[i], temperature=0.9, seed=i, max_tokens=40) for i in range(4)]
    cases = [(constraint, text) for text in MIXED for constraint in CONSTRAINTS]
    requests = [
        bound(
            [30 + index] * (3 + index),
            constraint,
            text,
            temperature=[0.0, 1.0, 4.0][index % 3],
            seed=index,
            stream=index % 2 == 0,
        )
        for index, (constraint, text) in enumerate(cases)
    ]
    async with served(model) as cluster:
        alone = [(await cluster.completes(request))[0].output_ids for request in free]
        results = await asyncio.gather(*(cluster.replies(request) for request in (*requests, *free)))
        for (constraint, _), request, replies in zip(cases, requests, results, strict=False):
            *chunks, last = replies
            assert (last.complete.finish_reason, last.complete.matched_token_id) == ("stop", EOS)
            check(constraint, last.complete.text)
            assert not request.stream or "".join(reply.chunk.text for reply in chunks) == last.complete.text
        assert [replies[-1].complete.output_ids for replies in results[len(requests) :]] == alone


async def test_each_child_has_a_place_of_its_own_in_the_grammar(model: Path) -> None:
    async with served(model) as cluster:
        for constraint in CONSTRAINTS:
            completes = await cluster.completes(bound([9] * 20, constraint, "speed:2", n=5, temperature=3.0, seed=4))
            assert len(completes) == 5 and len({complete.text for complete in completes}) > 1
            for complete in completes:
                check(constraint, complete.text)


async def test_any_object_and_what_cuts_an_answer_short(model: Path) -> None:
    async with served(model) as cluster:
        [done] = await cluster.completes(bound([5] * 9, {"json_object": True}, "full", max_tokens=40, temperature=1.0))
        assert done.text.startswith("{") and done.finish_reason in ("stop", "length")
        [cut] = await cluster.completes(bound([5] * 9, {"json_schema": json.dumps(SCHEMA)}, "full", stop=['"num'], seed=1))
        assert (cut.finish_reason, cut.matched_stop_str) == ("stop", '"num') and '"num' not in cut.text
        [off] = await cluster.completes(bound([5] * 9, {"json_object": False}, "full", max_tokens=5, ignore_eos=True))
        [plain] = await cluster.completes(ask([5] * 9, max_tokens=5))
        assert off.output_ids == plain.output_ids


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": '{"type":'}, "json_schema is not JSON"),
    ({"json_schema": '{"type": "objekt"}'}, "json_schema: Invalid type: objekt"),
    ({"regex": "(a"}, "regex: .*unclosed group"),
    ({"grammar": 'start: "a" b'}, 'grammar: .*unknown name: "b"'),
    ({"choice": shoal_pb2.ChoiceConstraint()}, "choice must have 1…1024 entries, not 0"),
    ({"choice": shoal_pb2.ChoiceConstraint(choices=["a", ""])}, "choice must not have an empty entry"),
    ({"regex": "x" * 200_000}, "regex has 200000 characters; send at most 131072"),
]


async def test_bad_constraints_are_refused_before_any_work_while_streams_go_on(model: Path) -> None:
    async with served(model) as cluster:
        running = asyncio.create_task(cluster.completes(ask([7] * 30, "speed:2", max_tokens=150)))
        for constraint, words in BAD:
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await cluster.completes(bound([1, 2, 3], constraint, "full"))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await running)[0].completion_tokens == 150
        [done] = await cluster.completes(bound([1, 2, 3], CONSTRAINTS[1], "full"))
        check(CONSTRAINTS[1], done.text)


async def test_a_grammar_that_gets_stuck_ends_its_own_request_alone(model: Path) -> None:
    """An ambiguous grammar exceeds what a step may cost: the request fails in words, its neighbour goes on, blocks are free."""
    ambiguous = {"grammar": 'start: e\ne: e e | "a"'}
    async with served(model) as cluster:
        running = asyncio.create_task(cluster.completes(ask([7] * 30, "speed:2", max_tokens=400)))
        for num_children in (1, 2):
            with pytest.raises(grpc.aio.AioRpcError, match=r"can be followed no further \(.*max is 500") as caught:
                await cluster.completes(
                    bound([1, 2, 3], ambiguous, "pop:2", n=num_children, max_tokens=600, logit_bias={EOS: -100.0})
                )
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await running)[0].completion_tokens == 400


async def test_a_failed_decode_worker_does_not_lose_the_place_in_the_grammar(model: Path) -> None:
    constraint = {"regex": "([a-z]{3}-){40}[a-z]"}
    request = bound([11] * 25, constraint, "speed:2", temperature=1.0, seed=3, stream=True, max_tokens=500)
    async with served(model, 1, 2) as cluster:
        [expected] = await cluster.completes(request)
        num_tokens, stopping = 0, None
        async for reply in cluster.stub.Generate(request):
            num_tokens += len(reply.chunk.token_ids)
            if stopping is None and num_tokens > 5:
                busy = next(worker for worker in cluster.decode if worker.load().num_running_reqs)
                stopping = asyncio.create_task(busy.stop(0.0))
            done = reply.complete
        assert stopping is not None
        await stopping
        assert (done.output_ids, done.num_retries) == (expected.output_ids, 1)
        assert re.fullmatch(constraint["regex"], done.text)
        cluster.decode_ends = [end for end, worker in zip(cluster.decode_ends, cluster.decode, strict=True) if worker is not busy]


async def test_forced_tool_calls_are_calls(model: Path) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "count", "parameters": parameters | {"additionalProperties": False}}}]
    chat = shoal_pb2.ChatInput(
        messages=[shoal_pb2.ChatMessage(role="user", content="Count!")],
        tools_json=json.dumps(tools),
        tool_choice_json=json.dumps({"type": "function", "function": {"name": "count"}}),
    )
    sampling = shoal_pb2.SamplingParams(max_tokens=200, temperature=2.0, seed=5)
    async with served(model) as cluster:
        [done] = await cluster.completes(shoal_pb2.GenerateRequest(chat=chat, sampling_params=sampling))
        call = json.loads(done.text)
        assert call["name"] == "count" and 0 <= call["arguments"]["n"] <= 9


@pytest.mark.slow
async def test_the_real_model_answers_in_the_schema() -> None:
    schema = {"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome", "Berlin"]}}, "required": ["capital"]}
    schema["additionalProperties"] = False
    async with _real() as cluster:
        for visibility in ("full", "speed:22", "pop:20"):
            message = shoal_pb2.ChatMessage(role="user", content="What is the capital of France? Answer in JSON.")
            sampling = shoal_pb2.SamplingParams(max_tokens=40, json_schema=json.dumps(schema))
            request = shoal_pb2.GenerateRequest(
                chat=shoal_pb2.ChatInput(messages=[message]), sampling_params=sampling, visibility=visibility
            )
            [done] = await cluster.completes(request)
            jsonschema.validate(json.loads(done.text), schema)
            assert done.finish_reason == "stop" and (visibility != "full" or "Paris" in done.text)


def _real() -> Any:
    from shoal.visibility import Visibility

    policies = tuple(Visibility.parse(text) for text in ("full", "speed:22", "pop:20"))
    return served(Path("smollm2-135m"), router={"visibilities": policies}, allowed_visibilities=policies, num_blocks=2000)
