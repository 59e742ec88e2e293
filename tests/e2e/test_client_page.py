"""Every Python example of docs/client.md and docs/http.md runs, against real workers of a tiny model."""

import asyncio
import contextlib
import io
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.served import Served, served

pytestmark = pytest.mark.e2e
DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = [
    pytest.param(page, text, id=f"{page}-{index}")
    for page in ("client", "http")
    for index, text in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL))
]


@pytest.fixture
async def cluster(tiny_model: Path) -> AsyncIterator[Served]:
    async with served(tiny_model, router={"http_listen": "127.0.0.1:0"}) as found:
        yield found


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize(("page", "example"), EXAMPLES)
async def test_the_example_runs(cluster: Served, page: str, example: str) -> None:
    served_here = {
        "127.0.0.1:50051": cluster.address,
        "127.0.0.1:8000": str(cluster.router.http_address),
        "speed:22": "speed:2",  # the tiny model has four layers
        "smollm2-135m": cluster.router.service.model_info().served_model_name,
    }
    for ours, here in served_here.items():
        example = example.replace(ours, here)
    printed = io.StringIO()

    def run() -> None:
        with contextlib.redirect_stdout(printed):
            exec(compile(example, f"{page}.md", "exec"), {"__name__": "example"})

    await asyncio.to_thread(run)
    assert printed.getvalue().strip()
