"""Builds public requests and maps a call's error back. Shared by both clients; makes no call."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeAlias, TypedDict

import grpc

from shoal.client.types import Image, Message
from shoal.errors import InvalidRequest, ShoalError, Unavailable, Unsupported
from shoal.pb.v1 import shoal_pb2
from shoal.rpc import error_from_rpc

Prompt: TypeAlias = str | Sequence[Message]
Text: TypeAlias = str | Sequence[int]  # a text or its token ids
_UNREACHABLE: Final = ("failed to connect", "dns resolution failed", "connections to all backends failing")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to pick tokens; what is None is left to the server: greedy, to the context limit, a drawn seed.

    One of the last five holds the answer to a form.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    logprobs: int | None = None  # 0: the sampled token's; k: the top k beside it
    prompt_logprobs: int | None = None  # visibility `full` only
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None  # Lark, as llguidance reads it
    choices: tuple[str, ...] = ()

    def message(self) -> shoal_pb2.SamplingParams:
        """The public message. Raises InvalidRequest for a value that its field cannot hold, or two forms at once."""
        forms = [name for name in ("json_schema", "json_object", "regex", "grammar", "choices") if getattr(self, name)]
        if len(forms) > 1:
            raise InvalidRequest(f"an answer can be held to one form, not to {' and '.join(forms)}")
        values = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) is not None}
        choices, schema = values.pop("choices"), values.pop("json_schema", None)
        if schema is not None:
            values["json_schema"] = schema if isinstance(schema, str) else json.dumps(schema)
        if choices:
            values["choice"] = shoal_pb2.ChoiceConstraint(choices=choices)
        try:
            return shoal_pb2.SamplingParams(**values)
        except (ValueError, TypeError) as error:  # protobuf refuses what the field cannot hold
            raise InvalidRequest(f"a sampling value is out of range: {error}") from error


class Options(TypedDict, total=False):
    """What a request may say beside its prompt; everything may be left out."""

    system: str | None  # a system message before the prompt
    raw: bool  # the prompt is a text as it is, without the chat template
    token_ids: Sequence[int] | None  # instead of a prompt
    images: Sequence[Image]  # before a prompt that is one text; of a raw prompt and token ids: one for each placeholder
    sampling: Sampling | None
    visibility: str | None
    request_id: str
    model: str
    priority: str  # low, normal, high
    cache_salt: str  # cached prefixes are shared within one salt
    tools: Sequence[Mapping[str, Any]]  # OpenAI's definitions, given to the chat template
    tool_choice: str | Mapping[str, Any] | None  # none, auto, required, or OpenAI's object that names one


def build_request(prompt: Prompt | None, options: Options, *, stream: bool) -> shoal_pb2.GenerateRequest:
    """A text is one user message, unless `raw`. Raises InvalidRequest for a prompt given twice, or not at all."""
    token_ids, system, raw = options.get("token_ids"), options.get("system"), options.get("raw", False)
    if (prompt is None) == (token_ids is None):
        raise InvalidRequest(
            "give either a prompt or token ids, not both" if prompt is not None else "give a prompt or token ids"
        )
    request = shoal_pb2.GenerateRequest(
        request_id=options.get("request_id", ""),
        stream=stream,
        visibility=options.get("visibility"),
        model=options.get("model", ""),
        priority=options.get("priority", ""),
        cache_salt=options.get("cache_salt", ""),
        sampling_params=(options.get("sampling") or Sampling()).message(),
    )
    is_whole = raw or token_ids is not None
    if is_whole and (system is not None or options.get("tools")):
        raise InvalidRequest("raw prompts and token ids are whole prompts: leave out `system` and `tools`")
    if token_ids is not None:
        if raw:
            raise InvalidRequest("token ids are a whole prompt: leave out `raw`")
        request.tokenized.CopyFrom(_tokenized(token_ids))
    elif raw:
        if not isinstance(prompt, str):
            raise InvalidRequest("a raw prompt is one text; send chat messages without `raw`")
        request.text = prompt
    elif prompt is not None:
        request.chat.CopyFrom(_chat(prompt, system, options))
    if is_whole:
        request.images.extend(shoal_pb2.Image(data=image.data) for image in options.get("images", ()))
    return request


def check_one(options: Options) -> None:
    """Raises InvalidRequest when several answers are asked for where one is handed out."""
    sampling = options.get("sampling")
    if sampling is not None and (sampling.n or 1) > 1:
        raise InvalidRequest(f"n = {sampling.n} gives several answers; use complete_all or generate")


def build_score(
    prompt: Text,
    continuation: Text,
    *,
    logprobs: int,
    visibility: str | None,
    request_id: str,
    model: str,
    images: Sequence[Image] = (),
) -> shoal_pb2.ScoreRequest:
    """Texts are taken as they are; token ids are told from them by their type."""
    request = shoal_pb2.ScoreRequest(request_id=request_id, visibility=visibility, model=model)
    try:
        request.logprobs = logprobs
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"logprobs is out of range: {error}") from error
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokenized.CopyFrom(_tokenized(prompt))
    if isinstance(continuation, str):
        request.continuation_text = continuation
    else:
        request.continuation_tokenized.CopyFrom(_tokenized(continuation))
    request.images.extend(shoal_pb2.Image(data=image.data) for image in images)
    return request


def build_tokenize(
    prompt: Prompt, *, raw: bool, add_special_tokens: bool | None, images: Sequence[Image] = ()
) -> shoal_pb2.TokenizeRequest:
    """A text is one user message, unless `raw`."""
    given = build_request(prompt, Options(raw=raw, images=images), stream=False)
    request = shoal_pb2.TokenizeRequest(images=given.images)
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    if given.HasField("chat"):
        request.chat.CopyFrom(given.chat)
    else:
        request.text = given.text
    return request


def read_error(error: grpc.RpcError, address: str) -> ShoalError:
    """The error of a failed call; one line when nobody answers at the address, or something else does."""
    mapped = error_from_rpc(error)
    words = str(mapped).lower()
    if isinstance(mapped, Unsupported) and words.startswith("method not found"):
        return Unsupported(f"the server at {address} is no Shoal router; a worker's or controller's port is not for clients")
    if "://" in address and words.startswith("errors resolving"):
        return InvalidRequest(f"the address {address!r} must be host:port, without http:// or https://")
    if isinstance(mapped, Unavailable) and words.startswith(_UNREACHABLE):
        if "http1.x" in words:
            return Unavailable(f"the server at {address} speaks HTTP, not gRPC; give the port of --listen, not of --http-listen")
        if "wrong_version_number" in words:
            return Unavailable(f"the server at {address} speaks no TLS; leave TLS out, or check the port")
        if "certificate_verify_failed" in words:
            return Unavailable(f"the certificate of {address} is not signed by the given CA, or names another host")
        return Unavailable(f"no server answers at {address}; start one with `shoal serve` or check the address")
    return mapped


def _tokenized(token_ids: Sequence[int]) -> shoal_pb2.TokenizedInput:
    try:
        return shoal_pb2.TokenizedInput(input_ids=token_ids)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"a token id is out of range: {error}") from error


def _chat(prompt: Prompt, system: str | None, options: Options) -> shoal_pb2.ChatInput:
    images = tuple(options.get("images", ()))
    if images and not isinstance(prompt, str):
        raise InvalidRequest("`images` go with a prompt that is one text; put them into the messages' content")
    messages = [Message("user", (*images, prompt) if images else prompt)] if isinstance(prompt, str) else list(prompt)
    if system is not None:
        messages.insert(0, Message("system", system))
    tools, choice = options.get("tools"), options.get("tool_choice")
    return shoal_pb2.ChatInput(
        messages=[_chat_message(message) for message in messages],
        tools_json=json.dumps(list(tools)) if tools else "",
        tool_choice_json=json.dumps(choice) if choice is not None else "",
    )


def _part(part: str | Image) -> shoal_pb2.ContentPart:
    if isinstance(part, str):
        return shoal_pb2.ContentPart(text=part)
    return shoal_pb2.ContentPart(image=shoal_pb2.Image(data=part.data))


def _chat_message(message: Message) -> shoal_pb2.ChatMessage:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return shoal_pb2.ChatMessage(
        role=message.role,
        content=message.content if isinstance(message.content, str) else "",
        content_parts=() if isinstance(message.content, str) else map(_part, message.content),
        tool_calls_json=json.dumps(calls) if calls else "",
        tool_call_id=message.tool_call_id,
        name=message.name,
    )
