"""Score and prompt log-probabilities through router and workers, held to an independent program without a cache."""

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal.engine.local import LocalRequest
from shoal.model_files import load_tokenizer, open_model, write_random_model
from shoal.pb.v1 import shoal_pb2
from shoal.placement.arithmetic import wire_bytes
from shoal.types import DType, SamplingParams
from shoal.visibility import Visibility
from tests.e2e.served import ask, local, served
from tests.oracle.mask_oracle import Case, MaskOracle

VOCAB = 512
CASES = [
    Case("full"),
    Case("full", boundary=5),
    Case("speed", 2, 1),
    Case("speed", 3, 4, 4),
    Case("speed", 1, 0),
    Case("pop", 2),
    Case("pop", 1, boundary=3, late=True),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> MaskOracle:
    return MaskOracle(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager"))


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def tokens(of: list[int]) -> shoal_pb2.TokenizedInput:
    return shoal_pb2.TokenizedInput(input_ids=of)


def scored(prompt: list[int], continuation: list[int], visibility: str = "full", **fields: Any) -> shoal_pb2.ScoreRequest:
    given = {"tokenized": tokens(prompt), "continuation_tokenized": tokens(continuation), "visibility": visibility}
    return shoal_pb2.ScoreRequest(**(given | fields))


@pytest.mark.parametrize("token_budget", [64, 3])
async def test_scores_are_the_oracles_log_softmax(model: Path, oracle: MaskOracle, token_budget: int) -> None:
    """Also when prompt and continuation are cut into chunks of three tokens, and many run at once beside generations."""
    rng = random.Random(token_budget)
    asked = []
    for case in CASES:
        for num_prompt, num_continuation in ((1, 1), (6, 1), (20, 13), (2, 40)):
            asked.append((case, ids(rng, num_prompt), ids(rng, num_continuation)))
    shape = open_model(str(model)).config.shape
    async with served(model, token_budget=token_budget) as cluster:
        busy = asyncio.create_task(cluster.completes(ask(ids(rng, 9), "speed:2", n=2, temperature=1.0, max_tokens=40)))
        requests = [scored(prompt, continuation, case.text, logprobs=3) for case, prompt, continuation in asked]
        answers = await asyncio.gather(*(cluster.stub.Score(request) for request in requests))
        await busy
    for (case, prompt, continuation), answer in zip(asked, answers, strict=True):
        rows = oracle.scores(prompt + continuation, len(prompt), case)[-len(continuation) - 1 : -1]
        expected = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        assert list(answer.logprobs.token_ids) == continuation
        assert list(answer.logprobs.token_logprobs) == pytest.approx(expected.tolist(), abs=1e-3), case
        assert answer.total_logprob == pytest.approx(sum(answer.logprobs.token_logprobs), abs=1e-6)
        for top, row in zip(answer.logprobs.top_logprobs, rows, strict=True):
            assert list(top.values) == pytest.approx(row.topk(3).values.tolist(), abs=1e-3) and len(top.token_ids) == 3
        assert answer.is_greedy == (rows.argmax(-1).tolist() == continuation)
        visibility = Visibility.parse(case.text).resolve(shape.num_layers)
        assert (answer.visibility, answer.prompt_tokens) == (str(visibility), len(prompt))
        crossed = wire_bytes(shape, DType.FLOAT32, visibility, len(prompt))
        assert answer.transfer.payload_bytes == answer.transfer.plan_bytes == crossed
        assert bool(answer.transfer.prefill_worker) == bool(crossed)


@pytest.mark.parametrize("visibility", ["full", "speed:2", "pop:2", "pop:1:late"])
async def test_a_greedy_answer_scores_as_it_was_generated(model: Path, visibility: str) -> None:
    prompt = ids(random.Random(4), 25)
    async with served(model) as cluster:
        [done] = await cluster.completes(ask(prompt, visibility, max_tokens=12, logprobs=0))
        answer = list(done.output_ids)
        score = await cluster.stub.Score(scored(prompt, answer, visibility))
        assert score.is_greedy and not score.logprobs.top_logprobs[0].values
        assert list(score.logprobs.token_logprobs) == pytest.approx(list(done.output_logprobs.token_logprobs), abs=1e-3)
        other = await cluster.stub.Score(scored(prompt, [*answer[:-1], (answer[-1] + 1) % VOCAB], visibility))
        assert not other.is_greedy and other.total_logprob < score.total_logprob


def test_the_single_process_scores_alike(model: Path, oracle: MaskOracle) -> None:
    rng = random.Random(8)
    asked = [(case, ids(rng, 14), ids(rng, 9)) for case in CASES]
    params = SamplingParams(1, num_logprobs=2)
    requests = [
        LocalRequest(tuple(prompt), Visibility.parse(case.text), params, continuation_ids=tuple(continuation))
        for case, prompt, continuation in asked
    ]
    for (case, prompt, continuation), result in zip(asked, local(model, requests, token_budget=5), strict=True):
        rows = oracle.scores(prompt + continuation, len(prompt), case)[-len(continuation) - 1 : -1]
        expected = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0].tolist()
        assert result.token_ids == tuple(continuation)
        assert [token.logprob for token in result.logprobs] == pytest.approx(expected, abs=1e-4)


async def test_text_is_tokenised_as_the_joined_text_goes_on(model: Path) -> None:
    tokenizer = load_tokenizer(open_model(str(model)))
    async with served(model) as cluster:
        for prompt, continuation in (("the sea ", "is wide"), ("the s", "ea"), ("one", " two")):
            request = shoal_pb2.ScoreRequest(text=prompt, continuation_text=continuation, visibility="speed:2")
            answer = await cluster.stub.Score(request)
            before, joined = tokenizer.encode(prompt), tokenizer.encode(prompt + continuation)
            whole = joined[: len(before)] == before
            assert list(answer.logprobs.token_ids) == (joined[len(before) :] if whole else tokenizer.encode(continuation))


async def test_prompt_logprobs_under_full_are_run_on_decode_and_declared(model: Path, oracle: MaskOracle) -> None:
    rng = random.Random(6)
    async with served(model, token_budget=16) as cluster:
        for num_prompt, num_children, stream in ((1, 1, False), (2, 1, True), (90, 1, False), (41, 3, True)):
            prompt = ids(rng, num_prompt)
            request = ask(prompt, prompt_logprobs=2, n=num_children, logprobs=0, max_tokens=5, stream=stream)
            replies = await cluster.replies(request)
            completes = {r.complete.index: r.complete for r in replies if r.HasField("complete")}
            first = completes[0]
            assert first.visibility == f"full:boundary={num_prompt}" and first.transfer.payload_bytes == 0
            assert any("prompt_logprobs: the whole prompt was run on decode" in notice for notice in first.notices)
            rows = oracle.scores(prompt, num_prompt, Case("full", boundary=num_prompt))[:-1]
            expected = [float(row[token]) for row, token in zip(rows, prompt[1:], strict=True)]
            given = first.input_logprobs
            assert list(given.token_ids) == prompt[1:]
            assert list(given.token_logprobs) == pytest.approx(expected, abs=1e-3)
            assert [list(top.values) for top in given.top_logprobs] == [
                pytest.approx(row.topk(2).values.tolist(), abs=1e-3) for row in rows
            ]
            assert all(not completes[child].HasField("input_logprobs") for child in completes if child)
            chunks = [r.chunk for r in replies if r.HasField("chunk")]
            if stream:
                assert chunks[0].input_logprobs == given and not any(c.HasField("input_logprobs") for c in chunks[1:])
            [plain] = await cluster.completes(ask(prompt, max_tokens=5))
            assert [list(c.output_ids) for c in completes.values()] == [list(plain.output_ids)] * num_children
        [result] = local(
            model,
            [LocalRequest(tuple(prompt), Visibility.parse("full"), SamplingParams(2, ignore_eos=True), prompt_logprobs=2)],
            token_budget=7,
        )
        assert [token.logprob for token in result.prompt_logprobs] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("visibility", ["speed:2", "pop:2", "pop:1:late"])
async def test_prompt_logprobs_elsewhere_are_refused_with_the_reason(model: Path, visibility: str) -> None:
    async with served(model) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="prompt_logprobs need visibility full: under") as caught:
            await cluster.completes(ask([1, 2, 3], visibility, prompt_logprobs=0))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        [done] = await cluster.completes(ask([1, 2, 3], "speed:4", prompt_logprobs=0))  # K = L is full
        assert len(done.input_logprobs.token_logprobs) == 2


async def test_a_score_that_fails_is_started_anew_and_one_that_is_cancelled_leaves_nothing(model: Path) -> None:
    rng = random.Random(9)
    prompt, continuation = ids(rng, 30), ids(rng, 300)
    request = scored(prompt, continuation, "speed:2", request_id="s")
    async with served(model, 1, 2, token_budget=4) as cluster:
        whole = await cluster.stub.Score(request)
        running = asyncio.ensure_future(cluster.stub.Score(request))
        await cluster.busy_worker()
        running.cancel()
        await cluster.all_free()
        running = asyncio.ensure_future(cluster.stub.Score(request))
        await cluster.abort("s")
        with pytest.raises(grpc.aio.AioRpcError, match="was aborted") as caught:
            await running
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        await cluster.all_free()
        running = asyncio.ensure_future(cluster.stub.Score(request))
        busy = await cluster.busy_worker()
        await cluster.stop(busy)
        again = await running
        assert again.transfer.decode_worker != busy.config.worker_id
        assert list(again.logprobs.token_logprobs) == pytest.approx(list(whole.logprobs.token_logprobs), abs=1e-3)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (scored([], [1]), "prompt is empty"),
        (scored([1], []), "the continuation is empty"),
        (shoal_pb2.ScoreRequest(tokenized=tokens([1])), "the continuation is empty"),
        (shoal_pb2.ScoreRequest(continuation_tokenized=tokens([1])), "has no input"),
        (scored([VOCAB], [1]), r"input_ids\[0\] is 512"),
        (scored([1], [3, VOCAB]), r"continuation_tokenized.input_ids\[1\] is 512"),
        (scored([1] * 400, [1] * 113), r"prompt \(400 tokens\) \+ continuation \(113\) exceed the context limit of 512"),
        (scored([1], [1], logprobs=21), "logprobs must lie in 0…20"),
        (scored([1], [1], logprobs=-1), "logprobs must lie in 0…20"),
        (scored([1], [1], "speed:9"), "exceeds the model's 4 layers"),
    ],
)
async def test_bad_scores_are_refused_with_words(model: Path, request_: shoal_pb2.ScoreRequest, words: str) -> None:
    async with served(model) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await cluster.stub.Score(request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
