"""The body of /v1/chat/completions to the public request. Knows OpenAI's messages, tools and their options."""

from dataclasses import dataclass
from typing import Final

from shoal.pb.v1 import shoal_pb2
from shoal.router.http.data_urls import read_image
from shoal.router.http.errors import BadField, UnsupportedField
from shoal.router.http.fields import Fields, dump_field
from shoal.router.http.sampling import COMMON, include_usage, read_priority, read_response_format, read_sampling, read_visibility
from shoal.router.tools import Tools, read_tools

_ROLES: Final = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_MESSAGE: Final = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "refusal",
    "audio",
    "annotations",
    "reasoning_content",
)
_OWN: Final = (
    "messages", "logprobs", "top_logprobs", "max_completion_tokens", "response_format", "tools", "tool_choice",
    "parallel_tool_calls", "modalities",
)  # fmt: skip
CHAT_FIELDS: Final = frozenset((*COMMON, *_OWN))
_NOT_OFFERED: Final = ("functions", "function_call", "audio", "prediction", "reasoning_effort", "web_search_options", "verbosity")


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """A request, and how its answer is to be written."""

    request: shoal_pb2.GenerateRequest
    include_usage: bool
    tools: Tools | None
    parallel_tool_calls: bool
    wants_logprobs: bool


def read_chat(fields: Fields) -> ChatQuestion:
    """Raises BadField (400) and UnsupportedField (501) that name the field."""
    for name in _NOT_OFFERED:
        if fields.raw(name) is not None:
            raise UnsupportedField(name, f"{name} is not offered here; leave it out")
    fields.check_known(CHAT_FIELDS)
    if (fields.array("modalities") or ["text"]) != ["text"]:
        raise UnsupportedField("modalities", "modalities other than text are not offered")
    sampling = read_sampling(fields)
    _read_max_completion_tokens(fields, sampling)
    read_response_format(fields, sampling)
    _read_logprobs(fields, sampling)
    chat = shoal_pb2.ChatInput(messages=_messages(fields))
    if (tools := fields.array("tools")) is not None:
        chat.tools_json = dump_field(tools, "tools")
    if (choice := fields.raw("tool_choice")) is not None:
        chat.tool_choice_json = dump_field(choice, "tool_choice")
    return ChatQuestion(
        request=shoal_pb2.GenerateRequest(
            chat=chat,
            sampling_params=sampling,
            stream=bool(fields.flag("stream")),
            visibility=read_visibility(fields),
            priority=read_priority(fields),
            cache_salt=fields.text("cache_salt") or "",
            model=fields.text("model") or "",
        ),
        include_usage=include_usage(fields),
        tools=read_tools(chat.tools_json, chat.tool_choice_json),
        parallel_tool_calls=fields.flag("parallel_tool_calls") is not False,
        wants_logprobs=sampling.HasField("logprobs"),
    )


def read_chat_messages(fields: Fields) -> shoal_pb2.ChatInput:
    """Messages and tools alone, as /tokenize takes them."""
    tools = fields.array("tools")
    return shoal_pb2.ChatInput(messages=_messages(fields), tools_json=dump_field(tools, "tools") if tools else "")


def _messages(fields: Fields) -> list[shoal_pb2.ChatMessage]:
    messages = fields.need(fields.array("messages"), "messages")
    if not messages:
        fields.refuse("messages", "is empty; send at least one message")
    return [_message(Fields(message, f"messages[{index}]")) for index, message in enumerate(messages)]


def _message(fields: Fields) -> shoal_pb2.ChatMessage:
    fields.check_known(_MESSAGE)
    role = fields.need(fields.choice("role", _ROLES), "role")
    content = _content(fields)
    calls = fields.array("tool_calls")
    if content is None and not calls:
        if role == "assistant":
            content = fields.text("refusal")
        if content is None:
            fields.refuse("content", "is missing")
    if role == "user" and not content:
        fields.refuse("content", "is empty; write something or leave the message out")
    return shoal_pb2.ChatMessage(
        role=_ROLES[role],
        content=content if isinstance(content, str) else "",
        content_parts=content if isinstance(content, list) else (),
        name=fields.text("name") or "",
        tool_calls_json=dump_field(calls, fields.path("tool_calls")) if calls else "",
        tool_call_id=fields.text("tool_call_id") or "",
    )


def _content(fields: Fields) -> str | list[shoal_pb2.ContentPart] | None:
    """One text, or parts: texts, which are joined unless there are images among them."""
    raw = fields.raw("content")
    if raw is None or isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        fields.refuse("content", "must be a text or a list of parts")
    parts = [_part(Fields(part, f"{fields.path('content')}[{index}]")) for index, part in enumerate(raw)]
    if any(part.HasField("image") for part in parts):
        return parts
    return "".join(part.text for part in parts)


def _part(fields: Fields) -> shoal_pb2.ContentPart:
    kind = fields.need(fields.text("type"), "type")
    if kind == "image_url":
        return shoal_pb2.ContentPart(image=shoal_pb2.Image(data=read_image(fields)))
    if kind not in ("text", "refusal"):
        raise UnsupportedField("messages", f"{fields.path('type')} is {kind!r}; only text and image_url are offered")
    return shoal_pb2.ContentPart(text=fields.need(fields.text(kind), kind))


def _read_max_completion_tokens(fields: Fields, sampling: shoal_pb2.SamplingParams) -> None:
    """OpenAI's newer name of max_tokens."""
    newer = fields.integer("max_completion_tokens", 1, 1 << 53, bounded=False)
    if newer is None:
        return
    if sampling.HasField("max_tokens") and sampling.max_tokens != newer:
        raise BadField("max_completion_tokens", "max_tokens and max_completion_tokens differ; send one of them")
    sampling.max_tokens = newer


def _read_logprobs(fields: Fields, sampling: shoal_pb2.SamplingParams) -> None:
    wanted, num_top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, 20)
    if wanted:
        sampling.logprobs = num_top or 0
    elif num_top:
        raise BadField("top_logprobs", "top_logprobs needs logprobs to be true")
