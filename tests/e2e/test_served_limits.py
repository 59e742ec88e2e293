"""Long prompts, and every kind of bad input beside a stream that goes on; a router and real workers of a tiny model."""

import asyncio
import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from shoal.model_files import write_random_model
from shoal.pb.v1 import shoal_pb2
from shoal.rpc import open_channel
from shoal.visibility import Visibility
from tests.e2e.served import ask, served

CODE = grpc.StatusCode
INVALID = CODE.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


async def test_a_prompt_of_128k_tokens_passes(tmp_path: Path) -> None:
    """A message of more than gRPC's own 4 MB; one window layer, so that the prompt costs little."""
    model = write_random_model(
        tmp_path, architecture="mistral", sliding_window=32, num_layers=2, hidden_size=16, num_heads=1, num_kv_heads=1,
        head_dim=8, intermediate_size=16, vocab_size=300, max_context=140_000,
    )  # fmt: skip
    policies = (Visibility.parse("speed:1"),)
    limits: dict[str, Any] = {"allowed_visibilities": policies, "block_size": 64, "num_blocks": 6000, "token_budget": 1024}
    async with served(model, router={"visibilities": policies}, **limits) as cluster:
        request = ask([3 + i % 290 for i in range(131_072)], "speed:1", max_tokens=3)
        request.tokenized.original_text = "x" * (5 << 20)
        [done] = await cluster.completes(request)
        assert (done.prompt_tokens, done.completion_tokens) == (131_072, 3)
        written = shoal_pb2.GenerateRequest(text="e t " * 32_768, visibility="speed:1", sampling_params=request.sampling_params)
        assert (await cluster.completes(written))[0].prompt_tokens > 60_000
        request.tokenized.input_ids.extend([3] * 8_928)
        with pytest.raises(grpc.aio.AioRpcError, match="the prompt has 140000 tokens; the context limit is 140000"):
            await cluster.completes(request)


def chat(**message: Any) -> shoal_pb2.GenerateRequest:
    return shoal_pb2.GenerateRequest(chat=shoal_pb2.ChatInput(messages=[shoal_pb2.ChatMessage(**message)]))


def changed(**fields: Any) -> shoal_pb2.GenerateRequest:
    request = ask([5, 6, 7])
    request.MergeFrom(shoal_pb2.GenerateRequest(**fields))
    return request


BAD: list[tuple[shoal_pb2.GenerateRequest, grpc.StatusCode, str]] = [
    (ask([5], max_tokens=0), INVALID, "max_tokens must be at least 1, not 0"),
    (ask([5], max_tokens=-4), INVALID, "max_tokens must be at least 1, not -4"),
    (ask([5], max_tokens=512), INVALID, r"max_tokens \(512\) exceed the context limit of 512"),
    (ask([5], n=0), INVALID, "n must lie in 1…128, not 0"),
    (ask([5], n=129), INVALID, "n must lie in 1…128, not 129"),
    (ask([5], n=-1), INVALID, "n must lie in 1…128, not -1"),
    (ask([5], temperature=-0.5), INVALID, "temperature must be"),
    (ask([5], temperature=math.nan), INVALID, "temperature must be"),
    (ask([5], top_p=0.0), INVALID, "top_p must lie in"),
    (ask([5], top_p=1.01), INVALID, "top_p must lie in"),
    (ask([5], top_k=-2), INVALID, "top_k must be"),
    (ask([5], min_p=math.nan), INVALID, "min_p must lie in"),
    (ask([5], stop=["a"] * 65), INVALID, "stop has 65 entries; send at most 64"),
    (ask([5], stop=["a" * 1025]), INVALID, "stop has an entry of 1025 characters"),
    (ask([5], stop=[""]), INVALID, "stop strings must not be empty"),
    (ask([5], stop_token_ids=[512]), INVALID, r"stop_token_ids\[0\] is 512"),
    (ask([5], json_schema='{"type": "objekt"}'), INVALID, "json_schema: Invalid type: objekt"),
    (ask([5], json_schema="{"), INVALID, "json_schema is not JSON"),
    (ask([5], regex="[a"), INVALID, "regex: "),
    (ask([5], grammar="nonsense"), INVALID, "grammar: "),
    (ask([5], choice=shoal_pb2.ChoiceConstraint()), INVALID, "choice must have"),
    (ask([5], logprobs=21), INVALID, "logprobs must lie in"),
    (ask([5], logit_bias={5: 1e9}), INVALID, "logit_bias values must lie"),
    (ask([5], "speed:2", prompt_logprobs=0), CODE.UNIMPLEMENTED, "prompt_logprobs need visibility full"),
    (ask([512]), INVALID, r"input_ids\[0\] is 512"),
    (ask([]), INVALID, "the prompt is empty"),
    (ask([5] * 512), INVALID, "the prompt has 512 tokens"),
    (ask([5], "speed:9"), INVALID, "depth 9 exceeds the model's 4 layers"),
    (ask([5], "deep"), INVALID, "unknown visibility"),
    (shoal_pb2.GenerateRequest(), INVALID, "has no input"),
    (chat(role="pirate", content="arr"), INVALID, "chat message 0 has role 'pirate'"),
    (chat(role="user", content=""), INVALID, "chat message 0 is empty"),
    (chat(role="assistant", content="", tool_calls_json="{"), INVALID, "chat message 0: tool_calls must be"),
    (changed(model="gpt-9"), CODE.NOT_FOUND, "model 'gpt-9' is not served here"),
    (changed(request_id="x" * 257), INVALID, "request_id has 257 characters"),
]  # fmt: skip
BROKEN = [
    (b"\x2a\x04\x2a\x02\xc3\x28", "sampling_params.stop is not valid UTF-8"),
    (b"\x1a\x01\xff", "text is not valid UTF-8"),
    (b"\x08\x01\xff\xff", "no shoal.v1.GenerateRequest message"),
]


async def test_bad_input_has_its_status_and_names_its_field_while_other_streams_go_on(model: Path) -> None:
    async with served(model) as cluster:
        alone = (await cluster.completes(ask([9] * 20, "speed:2", max_tokens=300)))[0].output_ids
        running = asyncio.create_task(cluster.completes(ask([9] * 20, "speed:2", max_tokens=300, stream=True)))
        for bad, code, words in BAD:
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await cluster.completes(bad)
            assert caught.value.code() is code, bad
        async with open_channel(cluster.address) as channel:
            call = channel.unary_stream("/shoal.v1.Shoal/Generate", None, shoal_pb2.GenerateResponse.FromString)
            for data, words in BROKEN:
                with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                    _ = [reply async for reply in call(data)]
                assert caught.value.code() is INVALID
        assert (await running)[0].output_ids == alone
        assert (await cluster.completes(ask([9] * 20, "speed:2", max_tokens=300)))[0].output_ids == alone
        load = cluster.decode[0].load()
        assert (load.num_running_reqs, load.num_used_blocks) == (0, 0)
