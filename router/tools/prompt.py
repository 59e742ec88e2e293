"""Chat messages as a template takes them, tools and calls included. Knows roles and shapes; renders nothing."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shoal.errors import InvalidRequest
from shoal.pb.v1 import shoal_pb2

ROLES: Final = ("system", "user", "assistant", "tool")
MAX_PARTS: Final = 16_384  # of content, over all messages
# How SmolLM2 was taught to call functions (its model card), for every model whose chat template takes no tools.
_PREAMBLE: Final = """You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, please make the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},
... (more tool calls as required)
]</tool_call>"""  # noqa: E501

Message = dict[str, Any]


def read_messages(chat: shoal_pb2.ChatInput) -> list[Message]:
    """The messages for a template. Raises InvalidRequest that names the message."""
    if not chat.messages:
        raise InvalidRequest("the prompt is empty; send at least one chat message")
    return [_message(message, f"chat message {index}") for index, message in enumerate(chat.messages)]


def check_parts(chat: shoal_pb2.ChatInput) -> list[shoal_pb2.ContentPart]:
    """Every part of every message, in order. Raises InvalidRequest for too many."""
    num_parts = sum(len(message.content_parts) for message in chat.messages)
    if num_parts > MAX_PARTS:
        raise InvalidRequest(f"chat.messages hold {num_parts} content_parts; send at most {MAX_PARTS}")
    return [part for message in chat.messages for part in message.content_parts]


def _message(message: shoal_pb2.ChatMessage, where: str) -> Message:
    if message.role not in ROLES:
        raise InvalidRequest(f"{where} has role {message.role!r}; use one of {', '.join(ROLES)}")
    content = _content(message, where)
    if not content and message.role == "user":
        raise InvalidRequest(f"{where} is empty; give it content or leave it out")
    read: Message = {"role": message.role, "content": content}
    if message.name:
        read["name"] = message.name
    if message.tool_calls_json:
        if message.role != "assistant":
            raise InvalidRequest(f"{where} has tool_calls, but its role is {message.role!r}; only the assistant calls tools")
        read["tool_calls"] = _calls(message.tool_calls_json, where)
    if message.tool_call_id:
        read["tool_call_id"] = message.tool_call_id
    return read


def _content(message: shoal_pb2.ChatMessage, where: str) -> str | list[Message]:
    """A text; where there are images, the list of parts that templates of models with vision take."""
    parts = message.content_parts
    if not parts:
        return message.content
    if message.content:
        raise InvalidRequest(f"{where} has content and content_parts; give one of them")
    if not any(part.HasField("image") for part in parts):
        return "".join(part.text for part in parts)
    if message.role != "user":
        raise InvalidRequest(f"{where} has an image, but its role is {message.role!r}; only the user shows images")
    return [{"type": "image"} if part.HasField("image") else {"type": "text", "text": part.text} for part in parts]


def _calls(text: str, where: str) -> list[Message]:
    """OpenAI's `tool_calls`, the arguments as the object that templates expect."""
    try:
        calls = json.loads(text)
        return [
            {
                "id": str(call.get("id", "")),
                "type": "function",
                "function": {"name": str(call["function"]["name"]), "arguments": _arguments(call["function"])},
            }
            for call in calls
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InvalidRequest(
            f'{where}: tool_calls must be a list of {{"id": …, "type": "function", "function": {{"name": …, "arguments": …}}}}, '
            "the arguments being a JSON object, written out as a string"
        ) from None


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments") or {}
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(read, dict):
        raise ValueError
    return read


def with_tools_described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The same conversation for a template that takes no tools: definitions in a system message, calls as text."""
    described = [_as_text(message) for message in messages]
    if not tools:
        return described
    preamble = _PREAMBLE.format(tools=json.dumps([tool["function"] for tool in tools], ensure_ascii=False))
    if described and described[0]["role"] == "system":
        return [described[0] | {"content": f"{described[0]['content']}\n\n{preamble}"}, *described[1:]]
    return [{"role": "system", "content": preamble}, *described]


def _as_text(message: Mapping[str, Any]) -> Message:
    if "tool_calls" not in message:
        return dict(message)
    calls = json.dumps([call["function"] for call in message["tool_calls"]], ensure_ascii=False)
    content = f"{message['content']}\n" if message["content"] else ""
    return {"role": "assistant", "content": f"{content}<tool_call>{calls}</tool_call>"}
