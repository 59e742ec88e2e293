"""Tools a model may call: definitions, the prompt they make, the calls in an answer. Calls no tool."""

from shoal.router.tools.definitions import ToolChoice, ToolMode, Tools, read_tools
from shoal.router.tools.parser import CallDelta, CallStyle, TextDelta, ToolCallParser
from shoal.router.tools.prompt import check_parts, read_messages, with_tools_described

__all__ = [
    "CallDelta",
    "CallStyle",
    "TextDelta",
    "ToolCallParser",
    "ToolChoice",
    "ToolMode",
    "Tools",
    "check_parts",
    "read_messages",
    "read_tools",
    "with_tools_described",
]
