"""Text that is read piece by piece: what a model writes where a tool call may be, and a visibility's form."""

from shoal.router.tools import CallDelta, CallStyle, TextDelta, ToolCallParser
from shoal.visibility import Visibility
from tests.fuzz.draw import WORDS, Draw
from tests.fuzz.target import Target

_PIECES = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "{", "}", '"name"', '"arguments"', '"parameters"', ":", ",", '"f"', "[", "]",
    '"', "\\", "\\u", "\\ud83d", "1", "null", " ", "\n", ";", "word", '{"name": "f", "arguments": {"a": 1}}',
)  # fmt: skip


def _answer(draw: Draw) -> tuple[CallStyle, list[str]]:
    parts = [draw.pick(_PIECES) if draw.chance(85) else draw.pick(WORDS) for _ in range(draw.count(20))]
    return draw.pick(tuple(CallStyle)), parts


def call_answer(given: tuple[CallStyle, list[str]]) -> None:
    """What a model writes is hostile too. In pieces and at once it must read the same."""
    style, parts = given
    told = []
    for pieces in (parts, ["".join(parts)]):
        parser = ToolCallParser(style, frozenset("f"))
        events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        arguments = ["" for _ in range(parser.num_calls)]
        for event in events:
            if isinstance(event, CallDelta):
                arguments[event.index] += event.arguments
        told.append((text, arguments))
    if told[0] != told[1]:
        raise AssertionError(f"in pieces {told[0]}, at once {told[1]}")


def _visibility(draw: Draw) -> str:
    parts = (
        "full",
        "speed",
        "pop",
        ":",
        "=",
        "boundary",
        "anchors",
        "sink",
        "late",
        "2",
        "0",
        "9" * 12,
        "-1",
        "\u0662",
        " ",
        *WORDS,
    )
    return "".join(draw.pick(parts) for _ in range(draw.count(9)))


def call_visibility(text: str) -> None:
    parsed = Visibility.parse(text)
    if Visibility.parse(str(parsed)) != parsed:
        raise AssertionError(f"{parsed} reads back as something else")
    parsed.resolve(30)


TARGETS = (
    Target("tool-calls", 10, _answer, call_answer),
    Target("visibility", 5, _visibility, call_visibility),
)
