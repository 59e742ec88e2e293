"""Tools: definitions and choices are checked, prompts tell of them, calls are found in answers however they are cut."""

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import InvalidRequest
from shoal.model_files import load_tokenizer, open_model
from shoal.pb.v1 import shoal_pb2
from shoal.router.text import ChatTemplate, PromptEncoder
from shoal.router.tools import CallDelta, CallStyle, TextDelta, ToolCallParser, ToolMode, read_messages, read_tools

NAMES = frozenset({"weather", "add"})
ZURICH = '{"city": "Zürich", "days": [1, 2]}'
HERMES = f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ZURICH}}}\n</tool_call>'
SMOLLM = '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "weather", "arguments": {}}]</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "a}\\"b"}}; {"name": "add", "parameters": {}}'


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "…", "parameters": {"type": "object", **parameters}}}


def parse(text: str, style: CallStyle, cuts: set[int] = frozenset()) -> tuple[str, list[tuple[str, str]]]:  # type: ignore[assignment]
    """The text and the calls (name, arguments), fed in pieces."""
    parser, events = ToolCallParser(style, NAMES), []
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for start, stop in pairwise(borders):
        events += parser.push(text[start:stop])
    events += parser.finish()
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallDelta):
            if event.name is not None:
                assert event.index == len(calls)
                calls.append([event.name, ""])
            calls[event.index][1] += event.arguments
    assert parser.num_calls == len(calls)
    return "".join(e.text for e in events if isinstance(e, TextDelta)), [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(
    ("style", "answer", "text", "calls"),
    [
        (CallStyle.TAGGED, HERMES, "Let me see.", [("weather", '{"city": "Zürich", "days": [1, 2]}')]),
        (CallStyle.TAGGED, SMOLLM, "", [("add", '{"a": 1}'), ("weather", "{}")]),
        (CallStyle.TAGGED, SMOLLM + "\n" + HERMES[12:], "", [("add", '{"a": 1}'), ("weather", "{}"), ("weather", ZURICH)]),
        (CallStyle.TAGGED, "<tool_call>[]</tool_call>", "", []),
        (CallStyle.TAGGED, '<tool_call>{"arguments": {"a": 2}, "name": "add"}</tool_call>', "", [("add", '{"a": 2}')]),
        (CallStyle.TAGGED, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', "", [("add", '{"a": 2}')]),
        (CallStyle.TAGGED, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        (CallStyle.TAGGED, '<tool_call>{"name": "add", "arguments": {"a": 2', "", [("add", '{"a": 2')]),  # cut by max_tokens
        (CallStyle.TAGGED, "a < b, <tool_cal> and \n", "a < b, <tool_cal> and \n", []),
        (CallStyle.TAGGED, "<tool_call>none</tool_call>", "<tool_call>none</tool_call>", []),
        (CallStyle.TAGGED, "<tool_call>{broken}</tool_call>!", "<tool_call>{broken}</tool_call>!", []),
        (CallStyle.TAGGED, '<tool_call>{"name": 3}', '<tool_call>{"name": 3}', []),
        (CallStyle.BARE, LLAMA, "", [("weather", '{"city": "a}\\"b"}'), ("add", "{}")]),
        (CallStyle.BARE, "<|python_tag|>" + LLAMA, "", [("weather", '{"city": "a}\\"b"}'), ("add", "{}")]),
        (CallStyle.BARE, '[{"name":"add","arguments":{"a":1}}]', "", [("add", '{"a":1}')]),
        (CallStyle.BARE, '{"name": "Anna", "age": 3}', '{"name": "Anna", "age": 3}', []),
        (CallStyle.BARE, ' {"name": "Anna", "parameters": {}} end ', ' {"name": "Anna", "parameters": {}} end ', []),
        (CallStyle.BARE, "It is 3. {}\n", "It is 3. {}\n", []),
        (CallStyle.BARE, "", "", []),
    ],
)  # fmt: skip
def test_calls_are_found_whole_and_in_pieces(style: CallStyle, answer: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert parse(answer, style) == (text, calls)
    assert parse(answer, style, set(range(len(answer)))) == (text, calls)


pieces = st.sampled_from(["<tool_call>", "</tool_call>", HERMES, SMOLLM, LLAMA, '"name"', '"add"', '"arguments"', *"{}[],: \nx"])


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces, max_size=12), st.sets(st.integers(0, 400), max_size=60), st.sampled_from(list(CallStyle)))
def test_cuts_change_nothing(parts: list[str], cuts: set[int], style: CallStyle) -> None:
    answer = "".join(parts)
    assert parse(answer, style, cuts) == parse(answer, style)


def test_arguments_stream_before_the_call_is_whole() -> None:
    parser = ToolCallParser(CallStyle.TAGGED, NAMES)
    assert parser.push('<tool_call>{"name": "add", "argum') == []
    assert parser.push('ents": {"a"') == [CallDelta(0, "add", '{"a"')]
    assert parser.push(": 1") == [CallDelta(0, None, ": 1")]
    assert parser.push("}}") == [CallDelta(0, None, "}")]
    assert parser.push("</tool_call>") == [] == parser.finish()


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ("{", "", "tools is not JSON"),
        ("{}", "", "tools must be a list"),
        ("[1]", "", r"tools\[0\] must be an object"),
        ('[{"type": "web_search"}]', "", r"tools\[0\]\.type is 'web_search'"),
        ('[{"type": "function"}]', "", r"tools\[0\]\.function must be"),
        ('[{"function": {"name": "a b"}}]', "", r"tools\[0\]\.function\.name"),
        ('[{"function": {"name": "a", "parameters": 3}}]', "", r"tools\[0\]\.function\.parameters"),
        (json.dumps([tool("a"), tool("a")]), "", "twice"),
        (json.dumps([tool("a")] * 129), "", "at most 128"),
        ("", '"required"', "no tools are given"),
        (json.dumps([tool("a")]), '"always"', "tool_choice must be"),
        (json.dumps([tool("a")]), '{"type": "function", "function": {"name": "b"}}', "names 'b', which is not among"),
    ],
)  # fmt: skip
def test_bad_tools_are_refused_by_name(tools: str, choice: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_tools(tools, choice)


def test_choices_make_schemas() -> None:
    defs = {"$defs": {"D": {"type": "integer"}}, "properties": {"d": {"$ref": "#/$defs/D"}}}
    both = json.dumps([tool("a", **defs), tool("b")])
    auto = read_tools(both)
    assert auto is not None and auto.choice.mode is ToolMode.AUTO and auto.call_schema() is None and auto.names == {"a", "b"}
    assert read_tools("") is None is read_tools("[]", '"none"')
    none = read_tools(both, '"none"')
    assert none is not None and none.offered == () and none.call_schema() is None
    required = json.loads(read_tools(both, '"required"').call_schema() or "")  # type: ignore[union-attr]
    first = required["items"]["anyOf"][0]["properties"]["arguments"]
    assert first["additionalProperties"] is False
    assert required["minItems"] == 1 and len(required["items"]["anyOf"]) == 2 and required["$defs"] == defs["$defs"]
    named = json.loads(read_tools(both, '{"function": {"name": "b"}}').call_schema() or "")  # type: ignore[union-attr]
    assert named["properties"]["name"] == {"const": "b"} and named["required"] == ["name", "arguments"]
    clash = json.dumps([tool("a", **defs), tool("b", **{"$defs": {"D": {"type": "string"}}})])
    with pytest.raises(InvalidRequest, match=r"\$defs\.D differently"):
        read_tools(clash, '"required"').call_schema()  # type: ignore[union-attr]


@cache
def encoder() -> PromptEncoder:
    return PromptEncoder(load_tokenizer(open_model("smollm2-135m")))


CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]


def conversation() -> list[dict[str, Any]]:
    chat = shoal_pb2.ChatInput()
    chat.messages.add(role="user", content="What is 1 + 1?")
    chat.messages.add(role="assistant", tool_calls_json=json.dumps(CALLS))
    chat.messages.add(role="tool", content="2", tool_call_id="c1", name="add")
    return read_messages(chat)


def test_a_template_that_takes_tools_gets_them_with_arguments_as_objects() -> None:
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.a }}){% endfor %}]{% endfor %}"
    )
    template = ChatTemplate(source, bos_token=None, eos_token=None)
    assert template.takes_tools
    text = template.render(conversation(), tools=[tool("add")])
    assert text == json.dumps([tool("add")], ensure_ascii=False) + "[user:What is 1 + 1?][assistant:add(1)][tool:2]"
    assert template.render(conversation()).startswith("[user")


def test_smollm2_is_told_of_tools_in_a_system_message_and_sees_its_calls() -> None:
    tokenizer = load_tokenizer(open_model("smollm2-135m"))
    ids = encoder().encode_chat(conversation(), [tool("add")]).token_ids
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert '<tools>[{"name": "add"' in text and text.count("<|im_start|>system") == 1
    assert '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\n2<|im_end|>" in text and text.endswith("<|im_start|>assistant\n")
    plain = tokenizer.decode(encoder().encode_chat(conversation()).token_ids, skip_special_tokens=False)
    assert "<tools>" not in plain


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"role": "function", "content": "x"}, "role 'function'"),
        ({"role": "user"}, "chat message 0 is empty"),
        ({"role": "user", "content": "x", "tool_calls_json": "[]"}, "only the assistant"),
        ({"role": "assistant", "tool_calls_json": "{"}, "tool_calls must be a list"),
        ({"role": "assistant", "tool_calls_json": '[{"function": {"name": "f", "arguments": "3"}}]'}, "must be a list"),
    ],
)  # fmt: skip
def test_bad_messages_are_refused_by_number(fields: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_messages(shoal_pb2.ChatInput(messages=[shoal_pb2.ChatMessage(**fields)]))


def test_styles_follow_the_template() -> None:
    assert CallStyle.of_template(None) is CallStyle.TAGGED
    assert CallStyle.of_template('{{ tools }} <tool_call> "parameters"') is CallStyle.TAGGED
    llama = 'Respond in the format {"name": function name, "parameters": dictionary}. {% if tools %}'
    assert CallStyle.of_template(llama) is CallStyle.BARE
