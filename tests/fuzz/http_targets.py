"""The HTTP door: bodies, from bytes to the public message and through its checks. Knows no socket."""

from collections.abc import Callable
from typing import Any

from shoal.pb.v1 import shoal_pb2
from shoal.router.http.chat_question import CHAT_FIELDS, read_chat, read_chat_messages
from shoal.router.http.completion_question import COMPLETION_FIELDS, read_completion
from shoal.router.http.fields import Fields, parse_json
from shoal.router.http.sampling import FLAGS, NUMBERS
from tests.fuzz.draw import Draw
from tests.fuzz.image_targets import part
from tests.fuzz.router_targets import VISIBILITIES, call_grpc, calls, tool_choice, tools
from tests.fuzz.target import Target


def _message(draw: Draw) -> Any:
    content = draw.pick((draw.text(), [{"type": "text", "text": "a"}], [part(draw), {"type": "text", "text": "a"}], draw.json(3)))
    message = {"role": draw.pick(("user", "assistant", "system", "tool", "developer")), "content": content}
    return message | ({"tool_calls": calls(draw)} if draw.chance(20) else {})


def _bias(draw: Draw) -> Any:
    return {draw.pick(("1", "299", "300", "x", "9" * 5000, "-1", "\u0661")): draw.number() for _ in range(draw.count())}


def _format(draw: Draw) -> Any:
    return {"type": draw.pick(("text", "json_object", "json_schema")), "json_schema": {"schema": draw.json(3)}}


GOOD: dict[str, Callable[[Draw], Any]] = {
    "messages": lambda draw: [_message(draw) for _ in range(draw.count(4))],
    "prompt": lambda draw: draw.pick((draw.text(), [draw.text()], [draw.below(310)], [[1, 2], [draw.below(310)]], draw.json(2))),
    "tools": tools,
    "tool_choice": tool_choice,
    "model": lambda draw: draw.pick(("random", "random", "other")),
    "visibility": lambda draw: draw.pick(VISIBILITIES),
    "logit_bias": _bias,
    "stop": lambda draw: draw.pick((draw.text(), [draw.text() for _ in range(draw.count())])),
    "stop_token_ids": lambda draw: [draw.integer() for _ in range(draw.count())],
    "stream_options": lambda draw: {"include_usage": draw.chance(50)},
    "response_format": _format,
    "structured_outputs": lambda draw: {draw.pick(("json", "regex", "grammar", "choice", "json_object")): draw.json(3)},
    "modalities": lambda draw: ["text"],
}
_INTEGERS = (
    "top_k",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "seed",
    "prefill_layers",
    "best_of",
    "top_logprobs",
)
_FLAGS = (*FLAGS, "stream", "echo", "logprobs", "parallel_tool_calls", "store", "add_special_tokens")


def _field_value(draw: Draw, name: str) -> Any:
    if draw.chance(88):
        if name in GOOD:
            return GOOD[name](draw)
        if name in NUMBERS:
            return draw.pick((0, 0.5, 1, 1.0, draw.number()))
        if name in _INTEGERS:
            return draw.pick((1, 2, 5, draw.below(300), draw.integer()))
        if name in _FLAGS:
            return draw.chance(50)
    return draw.pick((draw.integer(), draw.number(), draw.text(), draw.chance(50), draw.json(3)))


_ENDPOINTS: dict[str, tuple[str, ...]] = {
    "chat": tuple(sorted(CHAT_FIELDS)),
    "completion": tuple(sorted(COMPLETION_FIELDS)),
    "tokenize": ("messages", "tools", "model", "prompt"),
}


def _body(draw: Draw) -> tuple[str, bytes]:
    endpoint = draw.pick(("chat", "chat", "completion", "completion", "tokenize"))
    names = _ENDPOINTS[endpoint]
    body = {name: _field_value(draw, name) for name in (draw.pick(names) for _ in range(draw.below(7)))}
    for name in ("messages",) if endpoint != "completion" else ("prompt",):
        if draw.chance(85):
            body[name] = _field_value(draw, name)
    if draw.chance(3):
        body[draw.text()] = draw.json(2)
    return endpoint, draw.damaged(draw.json_text(body if draw.chance(98) else draw.json()).encode("utf-8", "surrogatepass"))


def call_http(given: tuple[str, bytes]) -> None:
    endpoint, body = given
    fields = Fields(parse_json(body))
    requests: list[Any]
    if endpoint == "chat":
        requests = [read_chat(fields).request]
    elif endpoint == "completion":
        requests = list(read_completion(fields).requests[:3])
    else:
        requests = [shoal_pb2.TokenizeRequest(chat=read_chat_messages(fields), model=fields.text("model") or "")]
    for request in requests:
        call_grpc((type(request), request.SerializeToString()))


TARGETS = (Target("http", 30, _body, call_http),)
