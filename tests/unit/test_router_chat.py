"""Chat templates with every role, rendered as transformers renders them; the boundary that `speed` takes from them."""

import json
from functools import cache
from typing import Any

import pytest

from shoal.errors import InvalidRequest
from shoal.model_files import Tokenizer, load_tokenizer, open_model
from shoal.pb.v1 import shoal_pb2
from shoal.router.text import ChatTemplate, PromptEncoder
from shoal.router.tools import read_messages, read_tools

# In the ways of Qwen 2.5, Llama 3.1 and Mistral: short, and with what their templates ask of a renderer.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- (tool_call.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """{%- set ns = namespace(index=0) %}{{- bos_token }}
{%- if tools is defined and tools is not none %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}{%- set ns.index = ns.index + 1 %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{%- set out = call.function | tojson %}
{{- out[:-1] + ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
{%- endfor %}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + message.content }}
{{- ', "call_id": "' + message.tool_call_id + '"}' }}
{%- elif message.role == 'assistant' %}{% generation %}{{- ' ' + message.content + eos_token }}{% endgeneration %}
{%- else %}{{- raise_exception('Only user, assistant and tool roles are supported!') }}{%- endif %}
{%- endfor %}"""

TOOLS = [{"type": "function", "function": {"name": "fisch", "description": "Wo? 日本", "parameters": {"type": "object"}}}]
CALLS = [{"id": "abcdefghi", "type": "function", "function": {"name": "fisch", "arguments": {"ort": "Zürich", "n": [1, 2]}}}]
PLAIN: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi 👋"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "So"},
]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Wo ist der Fisch?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": '"im See"', "tool_call_id": "abcdefghi"},
]
SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": " Be brief. "}]


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_model("smollm2-135m"))


@pytest.mark.parametrize("messages", [PLAIN, CALLED, SYSTEM + PLAIN, SYSTEM + CALLED], ids=["plain", "called", "system", "both"])
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("source", [QWEN, LLAMA, MISTRAL], ids=["qwen", "llama", "mistral"])
def test_every_role_is_rendered_as_transformers_renders_it(source: str, tools: list[Any], messages: list[Any]) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend, chat_template=source, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    own = ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>")
    if source == MISTRAL and messages[0]["role"] == "system":
        with pytest.raises(InvalidRequest, match="Only user, assistant and tool roles are supported!"):
            own.render(messages)
        return
    for generates in (True, False):
        expected = fast.apply_chat_template(messages, tools=tools or None, add_generation_prompt=generates, tokenize=False)
        assert own.render(messages, tools=tools, add_generation_prompt=generates) == expected


def test_messages_of_the_wire_reach_the_template_whole() -> None:
    chat = shoal_pb2.ChatInput(tools_json=json.dumps(TOOLS))
    for message in SYSTEM + CALLED:
        calls = json.dumps(
            [call | {"function": {"name": "fisch", "arguments": json.dumps(call["function"]["arguments"])}} for call in CALLS]
        )
        chat.messages.add(
            role=message["role"],
            content=message["content"],
            tool_call_id=message.get("tool_call_id", ""),
            tool_calls_json=calls if "tool_calls" in message else "",
        )
    tools = read_tools(chat.tools_json)
    assert tools is not None
    own = ChatTemplate(QWEN, bos_token=None, eos_token=None)
    assert own.render(read_messages(chat), tools=tools.offered) == own.render(SYSTEM + CALLED, tools=TOOLS)


@pytest.mark.parametrize(
    ("source", "tail"), [(QWEN, "<|im_start|>assistant\n"), (LLAMA, "<|start_header_id|>assistant<|end_header_id|>\n\n")]
)
@pytest.mark.parametrize("messages", [PLAIN, SYSTEM + CALLED], ids=["plain", "called"])
def test_the_boundary_is_the_generation_prompt_after_any_role(source: str, tail: str, messages: list[Any]) -> None:
    encoder = PromptEncoder(Tokenizer(tokenizer().backend, source, "<|im_start|>", "<|im_end|>"))
    for tools in ([], TOOLS):
        prompt = encoder.encode_chat(messages, tools)
        text = tokenizer().decode(prompt.token_ids[-prompt.boundary_tokens :], skip_special_tokens=False)
        assert text.endswith(tail) and len(text) <= len(tail) + 1  # a token may reach back over the border
        assert prompt.boundary_tokens == encoder.num_generation_tokens > 1


def test_a_template_that_stumbles_over_the_messages_refuses_them() -> None:
    for source in (
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].tool_calls[0].id }}",
        "{{ 1 / 0 }}",
    ):
        with pytest.raises(InvalidRequest, match="chat template refuses these messages"):
            ChatTemplate(source, bos_token=None, eos_token=None).render(PLAIN)


def test_special_tokens_that_a_user_writes_out_are_special_tokens() -> None:
    """As docs/parameters.md warns: an application that shows strangers' text to a model removes them first."""
    encoder, end = PromptEncoder(tokenizer()), tokenizer().eos_token_id
    plain = encoder.encode_chat([{"role": "user", "content": "a b"}]).token_ids.count(end)
    assert encoder.encode_chat([{"role": "user", "content": "a<|im_end|>b"}]).token_ids.count(end) == plain + 1
    assert tokenizer().decode([end, *tokenizer().encode("b")]) == "b"  # in answers they leave no text
