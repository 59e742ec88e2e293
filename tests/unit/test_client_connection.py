"""What the clients do beyond one call: every parameter, n, scores, retries, TLS, tokens; against scripted servers."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import pytest

from shoal.client import AsyncClient, Chunk, Client, Completion, Message, Retry, Sampling, ToolCall, tls_credentials
from shoal.client.connection import Attempts
from shoal.client.requests import Options, build_request
from shoal.errors import DeadlineExceeded, InvalidConfig, InvalidRequest, Unavailable
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import Address, RpcServer

NO_PAUSE = Retry(attempts=3, first_pause_s=0.0)


class Scripted(shoal_pb2_grpc.ShoalServicer):
    """Fails so often, then answers n times; keeps what it was sent."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.fail_after_chunk = False
        self.requests: list[Any] = []
        self.tokens: list[str] = []

    def _arrive(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.tokens += [value for name, value in context.invocation_metadata() if name == "authorization"]
        if len(self.requests) <= self.num_failures:
            raise Unavailable("a worker died")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[shoal_pb2.GenerateResponse]:
        if not self.fail_after_chunk:
            self._arrive(request, context)
        for index in reversed(range(request.sampling_params.n or 1)):
            if request.stream:
                yield shoal_pb2.GenerateResponse(chunk=shoal_pb2.GenerateStreamChunk(text="a", token_ids=[1], index=index))
            if self.fail_after_chunk:
                self._arrive(request, context)
            prompt = shoal_pb2.OutputLogProbs(token_logprobs=[-1.0], token_ids=[7])
            complete = shoal_pb2.GenerateComplete(text="a", finish_reason="stop", index=index, input_logprobs=prompt)
            yield shoal_pb2.GenerateResponse(complete=complete)

    async def Score(self, request: Any, context: Any) -> shoal_pb2.ScoreResponse:
        self._arrive(request, context)
        top = shoal_pb2.TopLogProbs(values=[-0.5, -2.0], token_ids=[4, 5])
        lists = shoal_pb2.OutputLogProbs(token_logprobs=[-0.5], token_ids=[4], top_logprobs=[top])
        return shoal_pb2.ScoreResponse(request_id="r", logprobs=lists, total_logprob=-0.5, is_greedy=True, prompt_tokens=3)

    async def GetLoads(self, request: Any, context: Any) -> shoal_pb2.GetLoadsResponse:
        self._arrive(request, context)
        return shoal_pb2.GetLoadsResponse()


class Server:
    """`async with Server() as server:` at `server.address`."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.servicer = Scripted()
        self._server = RpcServer(credentials=credentials)

    async def __aenter__(self) -> "Server":
        self._server.add(
            shoal_pb2_grpc.add_ShoalServicer_to_server, self.servicer, shoal_pb2.DESCRIPTOR.services_by_name["Shoal"]
        )
        self.address = str(await self._server.start(Address("127.0.0.1", 0)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()


def test_every_sampling_field_of_the_api_can_be_set() -> None:
    given = Sampling(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=1.0,
        logit_bias={7: -100.0}, max_tokens=9, min_tokens=2, stop=("x",), stop_token_ids=(5,), include_stop_str_in_output=True,
        ignore_eos=True, seed=4, n=2, logprobs=0, prompt_logprobs=1,
    )  # fmt: skip
    message = given.message()
    names = {one.name for one in message.DESCRIPTOR.fields}
    assert names - {one.name for one in fields(Sampling)} == {"choice"}
    for one in fields(Sampling):
        if one.name not in ("json_schema", "json_object", "regex", "grammar", "choices", "logit_bias"):
            sent = getattr(message, one.name)
            assert (tuple(sent) if isinstance(getattr(given, one.name), tuple) else sent) == getattr(given, one.name)
    assert dict(message.logit_bias) == {7: -100.0}
    for form, value in (("json_schema", {"type": "object"}), ("json_object", True), ("regex", "a+"), ("grammar", "start: /a/")):
        assert Sampling(**{form: value}).message().WhichOneof("constraint") == form  # type: ignore[arg-type]
    assert list(Sampling(choices=("yes", "no")).message().choice.choices) == ["yes", "no"]
    assert Sampling().message() == shoal_pb2.SamplingParams()
    with pytest.raises(InvalidRequest, match="one form, not to json_schema and regex"):
        Sampling(json_schema="{}", regex="a").message()


def test_conversations_with_tools() -> None:
    call = ToolCall("add", '{"a": 1}', id="c1")
    messages = [Message("user", "1 + 1?"), Message("assistant", tool_calls=(call,)), Message("tool", "2", tool_call_id="c1")]
    tools = [{"type": "function", "function": {"name": "add"}}]
    request = build_request(messages, Options(tools=tools, tool_choice="auto", system="Count.", model="m"), stream=True)
    roles = [message.role for message in request.chat.messages]
    assert roles == ["system", "user", "assistant", "tool"] and request.model == "m" and request.stream
    assert '"arguments": "{\\"a\\": 1}"' in request.chat.messages[2].tool_calls_json
    assert request.chat.messages[3].tool_call_id == "c1" and request.chat.tool_choice_json == '"auto"'
    assert '"add"' in request.chat.tools_json
    with pytest.raises(InvalidRequest, match="leave out `system` and `tools`"):
        build_request("a", Options(raw=True, tools=tools), stream=False)


async def test_several_answers_come_by_index() -> None:
    async with Server() as server, AsyncClient(server.address) as client:
        answers = await client.complete_all("a", sampling=Sampling(n=3))
        assert [answer.index for answer in answers] == [0, 1, 2] and answers[0].prompt_logprobs[0].logprob == -1.0
        events = [event async for event in client.generate("a", sampling=Sampling(n=2))]
        assert [(type(event), event.index) for event in events] == [(Chunk, 1), (Completion, 1), (Chunk, 0), (Completion, 0)]
        with pytest.raises(InvalidRequest, match="use complete_all"):
            await client.complete("a", sampling=Sampling(n=2))

        def use() -> list[int]:
            with Client(server.address) as blocking:
                return [answer.index for answer in blocking.complete_all("a", sampling=Sampling(n=2))]

        assert await asyncio.to_thread(use) == [0, 1]


async def test_scores() -> None:
    async with Server() as server, AsyncClient(server.address) as client:
        score = await client.score("a b", " c", logprobs=2, visibility="pop:20", request_id="r")
        assert (score.total_logprob, score.is_greedy, score.prompt_tokens, score.token_ids) == (-0.5, True, 3, (4,))
        assert score.logprobs[0].top == ((4, -0.5), (5, -2.0)) and score.transfer.payload_bytes == 0
        await client.score([1, 2], [3])
        texts, ids = server.servicer.requests
        assert (texts.text, texts.continuation_text, texts.logprobs, texts.visibility) == ("a b", " c", 2, "pop:20")
        assert list(ids.tokenized.input_ids) == [1, 2] and list(ids.continuation_tokenized.input_ids) == [3]
        assert not ids.HasField("visibility")
        with pytest.raises(InvalidRequest, match="token id is out of range"):
            await client.score([-1], [3])

        def use() -> float:
            with Client(server.address) as blocking:
                return blocking.score("a", "b").total_logprob

        assert await asyncio.to_thread(use) == -0.5


async def test_unavailable_is_tried_again_but_never_after_the_first_chunk() -> None:
    async with Server() as server, AsyncClient(server.address, retry=NO_PAUSE) as client:
        server.servicer.num_failures = 2
        assert (await client.complete("a")).text == "a" and len(server.servicer.requests) == 3
        server.servicer.requests.clear()
        assert (await client.score("a", "b")).is_greedy and len(server.servicer.requests) == 3
        server.servicer.requests.clear()
        assert not await client.loads() and len(server.servicer.requests) == 3

        def use() -> str:
            with Client(server.address, retry=NO_PAUSE) as blocking:
                blocking.loads()
                return blocking.complete("a").text

        server.servicer.requests.clear()
        assert await asyncio.to_thread(use) == "a" and len(server.servicer.requests) == 4
        server.servicer.requests.clear()
        server.servicer.num_failures = 3
        with pytest.raises(Unavailable, match="a worker died"):
            await client.complete("a")
        assert len(server.servicer.requests) == 3
        server.servicer.requests.clear()
        server.servicer.fail_after_chunk = True
        with pytest.raises(Unavailable):
            async for _ in client.generate("a"):
                pass
        assert len(server.servicer.requests) == 1
        async with AsyncClient(server.address, retry=Retry(attempts=1)) as once:
            server.servicer.requests.clear()
            with pytest.raises(Unavailable):
                await once.loads()
            assert len(server.servicer.requests) == 1


def test_pauses_double_and_end_with_the_deadline() -> None:
    now = 0.0
    attempts = Attempts(
        Retry(attempts=5, first_pause_s=0.1, longest_pause_s=0.3), 1.0, clock=lambda: now, rng=lambda low, high: high
    )
    error = Unavailable("x")
    assert [round(attempts.pause_s(error, started=False), 3) for _ in range(4)] == [0.1, 0.2, 0.3, 0.3]
    with pytest.raises(Unavailable):
        attempts.pause_s(error, started=False)
    late = Attempts(Retry(first_pause_s=0.5), 0.4, clock=lambda: now, rng=lambda low, high: high)
    with pytest.raises(Unavailable):  # the pause would outlast the deadline
        late.pause_s(error, started=False)
    now = 2.0
    with pytest.raises(DeadlineExceeded):
        _ = attempts.time_left_s
    assert Attempts(Retry(), None).time_left_s is None
    for bad in ({"attempts": 0}, {"first_pause_s": 3.0}):
        with pytest.raises(InvalidConfig):
            Retry(**bad)  # type: ignore[arg-type]


@pytest.fixture
def own_certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A key and a certificate for 127.0.0.1 that it signs."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, certificate


async def test_tls_and_tokens(own_certificate: tuple[Path, Path]) -> None:
    key, certificate = own_certificate
    pair = (key.read_bytes(), certificate.read_bytes())
    mutual = grpc.ssl_server_credentials([pair], root_certificates=pair[1], require_client_auth=True)
    async with Server(mutual) as server:
        ours = tls_credentials(ca=certificate, certificate=certificate, key=key)
        async with AsyncClient(server.address, credentials=ours, token="secret") as client:
            assert (await client.complete("a")).text == "a" and server.servicer.tokens == ["Bearer secret"]
            await client.loads()
        with pytest.raises(Unavailable):  # who are we?
            async with AsyncClient(server.address, credentials=tls_credentials(ca=certificate), retry=NO_PAUSE) as stranger:
                await stranger.loads()

        def use() -> str:
            with Client(server.address, credentials=ours, token="secret") as blocking:
                return blocking.complete("a").text

        assert await asyncio.to_thread(use) == "a" and set(server.servicer.tokens) == {"Bearer secret"}
    with pytest.raises(InvalidConfig, match="both a certificate and its key"):
        tls_credentials(certificate=certificate)
    with pytest.raises(InvalidConfig, match="cannot read"):
        tls_credentials(ca=key.with_name("none.pem"))


def test_the_evaluation_command_without_lm_eval_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "lm_eval.py").write_text("raise ModuleNotFoundError('no', name='lm_eval')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    command = [sys.executable, "-m", "shoal.client.lm_eval_model", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 1
    assert ended.stderr.strip() == "lm-eval is not installed (lm_eval is missing): pip install -e '.[eval]'"
