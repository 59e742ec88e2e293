"""docs/http.md names every endpoint, field, status and flag, and its curl examples answer as shown."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.router.http.chat_question import CHAT_FIELDS
from shoal.router.http.completion_question import COMPLETION_FIELDS
from shoal.router.http.errors import ROWS
from shoal.router.http.small_endpoints import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from tests.fakes.cluster import Cluster

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
EXAMPLES = [
    (command, answer)
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for command, answer in re.findall(r"\$ (curl .*?'|curl \S+)\n([{d].*?)(?=\n\$ |\Z)", block, re.DOTALL)
]


def test_every_endpoint_field_and_status_is_documented() -> None:
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/tokenize", "/detokenize")
    fields = CHAT_FIELDS | COMPLETION_FIELDS | TOKENIZE_FIELDS | DETOKENIZE_FIELDS
    assert len(fields) > 45
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert not [path for path in paths if path not in PAGE] and not fields - named - {"add_special_tokens"}
    for row in ROWS.values():
        assert f"| {row.status} | {row.kind} |" in PAGE and (row.code is None or f"`{row.code}`" in PAGE)


def shape(value: Any) -> Any:
    """Names and kinds, without what differs between runs."""
    if isinstance(value, dict):
        return {name: shape(entry) for name, entry in value.items() if name not in ("logprobs", "tool_calls", "message", "delta")}
    if isinstance(value, list):
        return [shape(entry) for entry in value[:1]]
    return type(value).__name__ if not isinstance(value, int | float) else "number"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_the_curl_examples_answer_in_the_shape_that_is_shown() -> None:
    assert len(EXAMPLES) >= 7
    async with Cluster() as c:
        for command, shown in EXAMPLES:
            process = await asyncio.create_subprocess_shell(
                command.replace("http://127.0.0.1:8000", c.http), stdout=asyncio.subprocess.PIPE
            )
            out, _ = await asyncio.wait_for(process.communicate(), 20)
            assert process.returncode == 0, command
            got, want = out.decode(), shown
            if shown.startswith("data:"):
                assert got.rstrip().endswith("data: [DONE]") and shown.rstrip().endswith("data: [DONE]")
                got, want = (text.strip().split("\n")[0].removeprefix("data: ") for text in (got, want))
            want_shape, got_shape = shape(json.loads(want)), shape(json.loads(got))
            for volatile in ("notices", "cached_tokens"):
                assert want_shape.get("shoal", {}).pop(volatile, None) is None or got_shape["shoal"].pop(volatile) is not None
            for choice in (*want_shape.get("choices", ()), *got_shape.get("choices", ())):
                choice.pop("finish_reason"), choice.pop("stop_reason", None)
            assert got_shape == want_shape, command
