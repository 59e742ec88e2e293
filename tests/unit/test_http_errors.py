"""What cannot be served over HTTP: each error has its status, OpenAI's shape and a message that names the field."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from shoal import errors
from shoal.client import AsyncClient, Retry, tls_credentials
from shoal.config.router import RouterConfig
from shoal.router.http.errors import ROWS, BadField, answer_error
from shoal.router.http.list_sizes import check_lists, check_structure
from tests.fakes.cluster import Cluster
from tests.fakes.workers import until

MESSAGES: Any = [{"role": "user", "content": "Why?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Cluster]:
    async with Cluster(http_max_body_bytes=20_000) as c:
        yield c


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
async def http(shared: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=shared.http, timeout=20) as opened:
        yield opened


BAD_CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": None}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hi"}, "messages", "must be a list, not a text"),
    ({"messages": ["hi"]}, "messages[0]", "must be an object, not a text"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "must be one of system, user"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content", "is empty"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a text or a list of parts"),
    ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight", "unknown field"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, None, "tool_calls must be a list"),
    ({"temperature": "hot"}, "temperature", "must be a number, not a text"),
    ({"temperature": True}, "temperature", "must be a number, not a boolean"),
    ({"temperature": -0.5}, "temperature", ">= 0"),
    ({"top_p": 0}, "top_p", "must lie in"),
    ({"top_p": 1.5}, "top_p", "must lie in"),
    ({"top_k": -2}, "top_k", "must be at least -1"),
    ({"max_tokens": 0}, "max_tokens", "must be at least 1, not 0"),
    ({"max_tokens": -1}, "max_tokens", "must be at least 1"),
    ({"max_tokens": 1.5}, "max_tokens", "must be an integer"),
    ({"max_tokens": 10**30}, "max_tokens", "must lie in"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "differ"),
    ({"max_tokens": 100_000}, "max_tokens", "context limit"),
    ({"n": 0}, "n", "must be at least 1, not 0"),
    ({"n": "two"}, "n", "must be an integer"),
    ({"seed": -1}, "seed", "must lie in 0…"),
    ({"stop": 3}, "stop", "a text or a list of texts"),
    ({"stop": ["a", 3]}, "stop[1]", "must be a text"),
    ({"stop": ["x"] * 65}, "stop", "at most 64"),
    ({"stop": ""}, "stop", "must not be empty"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "must be a token id"),
    ({"stop_token_ids": [99_999_999]}, "stop_token_ids", "lie in 0…49151"),
    ({"logprobs": 3}, "logprobs", "must be a boolean"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must lie in 0…20"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "keys are token ids"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5", "must be a number"),
    ({"stream": "yes"}, "stream", "must be a boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "for streams"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    ({"visibility": "deep"}, "visibility", "unknown visibility"),
    ({"visibility": "speed:5"}, "visibility", "not allowed here"),
    ({"visibility": "full", "prefill_layers": 3}, "prefill_layers", "contradicts"),
    ({"prefill_layers": 0}, "prefill_layers", "must lie in"),
    ({"cache_salt": 3}, "cache_salt", "must be a text"),
    ({"response_format": "json"}, "response_format", "must be an object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be one of"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema", "object"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "exactly one"),
    ({"tools": 3}, "tools", "must be a list"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice", "no tools are given"),
    ({"model": 3}, "model", "must be a text"),
    ({"priority": "urgent"}, "priority", "must be one of low, normal, high"),
    ({"priority": 1.5}, "priority", "must be an integer"),
    ({"service_tier": "gold"}, "service_tier", "must be one of auto"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
]  # fmt: skip
BAD_TEXT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": [49152]}, "prompt", "prompt[0] is 49152; the model's ids"),
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": {}}, "prompt", "not an object"),
    ({"prompt": ["a", 3]}, "prompt[1]", "must be a text"),
    ({"prompt": [[1], "a"]}, "prompt", "must be a list of token ids"),
    ({"prompt": [1, -3]}, "prompt", "must be a token id, not -3"),
    ({"prompt": [[99_999_999]]}, None, "lie in 0…49151"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
    ({"prompt": [5] * 9_000}, None, "context limit"),
    ({"logprobs": 21}, "logprobs", "must lie in 0…20"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"messages": MESSAGES}, "messages", "unknown field"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"), [(CHAT, *case) for case in BAD_CHAT] + [(TEXT, *case) for case in BAD_TEXT]
)
async def test_bad_fields_are_400_and_named(
    http: httpx2.AsyncClient, shared: Cluster, path: str, fields: dict[str, Any], param: str | None, words: str
) -> None:
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Why?"}
    num_seen = len(shared.decode[0].seen)
    answer = await http.post(path, json=base | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert words in error["message"] and (param is None or error["param"] == param), error
    assert ("context limit" in error["message"]) == (error["code"] == "context_length_exceeded")
    assert len(shared.decode[0].seen) == num_seen  # refused before any work


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"functions": []}, "functions"),
        (CHAT, {"modalities": ["audio"]}, "modalities"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages",
        ),
        (TEXT, {"suffix": "end"}, "suffix"),
        (TEXT, {"best_of": 3}, "best_of"),
    ],
)
async def test_what_is_not_offered_is_501(http: httpx2.AsyncClient, path: str, fields: dict[str, Any], param: str) -> None:
    answer = await http.post(path, json={"messages": MESSAGES} | fields if path == CHAT else {"prompt": "Why?"} | fields)
    assert answer.status_code == 501 and answer.json()["error"]["param"] == param
    assert answer.json()["error"]["code"] == "unsupported"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 12 is 0xff"),
        (b'{"prompt": "a",\n "n": }', "line 2, column 7"),
        (b'{"temperature": NaN}', "NaN is not a JSON value"),
        (b'{"prompt": "\\ud800"}', "half of a character"),
        (b"[1]", "must be an object, not a list"),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5_000 + b"}", "not JSON"),
    ],
)
async def test_bodies_that_cannot_be_read_name_the_place(http: httpx2.AsyncClient, body: bytes, words: str) -> None:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        answer = await http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


async def test_a_packed_body_is_refused_with_words(http: httpx2.AsyncClient) -> None:
    packed = gzip.compress(json.dumps({"messages": MESSAGES}).encode())
    answer = await http.post(CHAT, content=packed, headers={"content-type": "application/json", "content-encoding": "gzip"})
    assert answer.status_code == 400 and "content-encoding is 'gzip'; send it as it is" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": MESSAGES * 16_385}, "messages has 16385 entries; send at most 16384"),
        ({"messages": [{"role": "user", "content": [""] * 9_000}] * 2}, "18000 parts of content; send at most 16384"),
        ({"messages": [{"tool_calls": [0] * 20_000}]}, "20000 tool calls"),
        ({"tools": [0] * 129}, "tools has 129 entries"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids has 1025 entries"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias has 1025 entries"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice has 1025 entries"),
        ({"prompt": ["a"] * 129}, "prompt holds 129 prompts"),
        ({"prompt": [1] * ((1 << 20) + 1)}, "prompt has 1048577 entries"),
        ({"prompt": [[1] * (1 << 19)] * 3}, "prompt holds 1572864 token ids"),
        ({"tokens": [1] * ((1 << 20) + 1)}, "tokens has 1048577 entries"),
        ({"visibility": "x" * 129}, "visibility has 129 characters"),
    ],
)
async def test_lists_are_counted_as_soon_as_they_are_parsed(body: dict[str, Any], words: str) -> None:
    with pytest.raises(BadField, match=words):
        check_lists(body)


BIG = 7_900_000
MANY = {
    "messages": b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * (BIG // 30)) + b"]}",
    "logit_bias": b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % key for key in range(BIG // 11)) + b"}}",
    "lists": b'{"metadata":["\\ud83d\\ude00",' + b",".join([b"[]"] * (BIG // 3)) + b"]}",
    "numbers": b'{"metadata":["\\ud83d\\ude00",' + b",".join([b"9" * 4_299] * (BIG // 4_300)) + b"]}",
    "escapes": b'{"metadata":["' + b"\\ud83d\\ude00" * (BIG // 12) + b'"]}',
}


@pytest.mark.parametrize("kind", MANY)
async def test_no_body_within_the_limit_holds_the_event_loop(kind: str) -> None:
    async with Cluster() as c, httpx2.AsyncClient(base_url=c.http, timeout=60) as client:
        begun = time.process_time()  # what the loop is held for cannot be more, whatever else the machine does
        path = CHAT if kind == "messages" else TEXT
        answer = await client.post(path, content=MANY[kind], headers={"content-type": "application/json"})
        assert answer.status_code == 400 and time.process_time() - begun < 1


async def test_the_default_limit_holds_a_long_prompt_of_ids() -> None:
    body = json.dumps({"prompt": [49_151] * 131_072}).encode()
    assert len(body) < RouterConfig(model="smollm2-135m", workers=("prefill=a:1", "decode=b:1")).http_max_body_bytes
    check_structure(body)
    check_lists(json.loads(body))


async def test_numbers_beyond_json_are_named(http: httpx2.AsyncClient) -> None:
    schema = b'{"type":"integer","minimum":1e400}'
    ask = b'{"messages":[{"role":"user","content":"a"}],'
    for field, words in (
        (b'"structured_outputs":{"json":' + schema + b"}}", "structured_outputs.json cannot be written"),
        (b'"structured_outputs":{"json":' + json.dumps(schema.decode()).encode() + b"}}", "json_schema cannot be read"),
        (b'"tools":[' + schema + b"]}", "tools cannot be written"),
    ):
        answer = await http.post(CHAT, content=ask + field, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("headers", ["content-length: 99999999999999", "content-length: 30000\r\nexpect: 100-continue"])
async def test_a_body_that_will_be_too_large_is_refused_before_it_comes(shared: Cluster, headers: str) -> None:
    host, _, port = shared.http.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}\r\n\r\n".encode())
    told = await asyncio.wait_for(reader.read(), 10)
    assert told.startswith(b"HTTP/1.1 413 ") and b"20000 bytes" in told
    writer.close()


async def test_other_statuses(http: httpx2.AsyncClient, shared: Cluster) -> None:
    ask: dict[str, Any] = {"messages": MESSAGES}
    missing = await http.post(CHAT, json=ask | {"model": "gpt-4"})
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    assert "gpt-4" in missing.json()["error"]["message"]
    large = await http.post(TEXT, json={"prompt": "x" * 30_000})
    assert large.status_code == 413 and "20000 bytes" in large.json()["error"]["message"]
    form = await http.post(CHAT, data={"a": "b"})
    assert form.status_code == 400 and "application/json" in form.json()["error"]["message"]
    nowhere, wrong = await http.get("/v2"), await http.get(CHAT)
    assert nowhere.status_code == 404 and "nothing at /v2" in nowhere.json()["error"]["message"]
    assert wrong.status_code == 405 and wrong.json()["error"]["type"] == "invalid_request_error"
    for error, status, retry in (
        (errors.CapacityExceeded("0 blocks free"), 429, "1"),
        (errors.Unavailable("killed"), 503, "1"),
        (errors.Mismatch("another revision"), 500, None),
        (errors.Unsupported("not under speed"), 501, None),
    ):
        shared.decode[0].error = error
        for stream in (False, True):  # before the first chunk a stream fails with a status, too
            answer = await http.post(CHAT, json=ask | {"stream": stream})
            assert answer.status_code == status and answer.headers.get("retry-after") == retry
            assert str(error) in answer.json()["error"]["message"]
    shared.decode[0].error = None
    assert (await http.post(CHAT, json=ask | {"max_tokens": 2})).status_code == 200  # others go on


async def test_the_openai_client_raises_its_own_classes(shared: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=shared.http + "/v1", api_key="none", max_retries=0) as client:
        for fields, kind in (({"temperature": -1}, openai.BadRequestError), ({"model": "x"}, openai.NotFoundError)):
            with pytest.raises(kind):
                await client.chat.completions.create(**{"model": "", "messages": MESSAGES, **fields})  # type: ignore[call-overload]
        shared.decode[0].error = errors.CapacityExceeded("full")
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="", messages=MESSAGES)
        shared.decode[0].error = None


async def test_an_error_within_a_stream_is_its_last_event(http: httpx2.AsyncClient, shared: Cluster) -> None:
    worker = shared.decode[0]
    worker.fail_after, worker.delay_s = (3, errors.Mismatch("blocks disagree")), 0.03
    try:
        answer = await http.post(CHAT, json={"messages": MESSAGES, "stream": True})
    finally:
        worker.fail_after, worker.delay_s = None, 0.0
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert json.loads(events[-1])["error"]["message"] == "blocks disagree" and len(events) > 1 and "[DONE]" not in events


async def test_a_bug_of_ours_is_an_incident_whose_words_stay_here(
    http: httpx2.AsyncClient, shared: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(shared.router.service.parts.admission, "admit", broken)
    answer = await http.post(CHAT, json={"messages": MESSAGES})
    assert answer.status_code == 500 and "secret" not in answer.text
    incident = answer.json()["error"]["message"].split()[-1]
    assert incident in caplog.text and "secret detail" in caplog.text


async def test_a_deadline_and_a_slow_body_end_with_their_own_status() -> None:
    async with Cluster(max_request_s=0.2, http_body_timeout_s=0.2) as c, httpx2.AsyncClient(base_url=c.http) as http:
        c.decode[0].hang = True
        late = await http.post(CHAT, json={"messages": MESSAGES})
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        host, _, port = c.http.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_no_workers_is_503_and_health_says_so() -> None:
    async with Cluster() as c, httpx2.AsyncClient(base_url=c.http) as http:
        assert (await http.get("/health")).json() == {"status": "serving"}
        for worker in c.workers:
            c.board.states[worker] = "draining"
        c.board.publish()
        await until(lambda: not c.router.registry.can_serve)
        assert (await http.get("/health")).status_code == 503
        answer = await http.post(CHAT, json={"messages": MESSAGES})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable"


async def test_every_error_has_a_row() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ShoalError)]
    assert len(kinds) > 10
    for kind in kinds:
        answer = answer_error(kind("words"))
        assert answer.status >= 400 and (kind in ROWS or kind in (errors.ShoalError, errors.InvalidConfig))
    unauthenticated = answer_error(errors.Unauthenticated("no token"))
    assert unauthenticated.status == 401 and ("www-authenticate", "Bearer") in unauthenticated.headers


async def test_the_root_lists_every_endpoint(http: httpx2.AsyncClient) -> None:
    listed = (await http.get("/")).json()["endpoints"]
    assert {"GET /health", "GET /metrics", "GET /v1/models", f"POST {CHAT}", f"POST {TEXT}"} <= set(listed) and all(
        listed.values()
    )
    assert "Prometheus" in listed["GET /metrics"]
    assert all("/v1/" in path for path, words in listed.items() if words == "OpenAI's")
    assert "GET / lists" in (await http.get("/v2")).json()["error"]["message"]


async def test_a_client_at_the_wrong_port_is_told_so(shared: Cluster) -> None:
    at_http = shared.http.removeprefix("http://")
    options: dict[str, Any]
    for address, options, words in (
        (at_http, {}, "speaks HTTP, not gRPC; give the port of --listen"),
        (shared.address, {"credentials": tls_credentials()}, "speaks no TLS"),
        (shared.http, {}, "must be host:port, without http://"),
        (shared.decode[0].description.address, {}, "no Shoal router"),
    ):
        async with AsyncClient(address, retry=Retry(attempts=1), **options) as client:
            with pytest.raises(errors.ShoalError, match=words):
                await client.server_info()
