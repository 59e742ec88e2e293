"""docs/parameters.md tells of every parameter of both doors, with tests that exist and speak of it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from shoal.pb.v1 import shoal_pb2
from shoal.router.http.chat_question import CHAT_FIELDS
from shoal.router.http.completion_question import COMPLETION_FIELDS
from tests.unit.test_parameters import CASES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parameters.md").read_text()


def rows() -> dict[str, list[str]]:
    """Cells of the tables' rows by the parameter in their first cell."""
    lines = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")
    ]
    return {name: cells for cells in lines for name in re.findall(r"`(\w+)`", cells[0])}


@cache
def functions_in(path: Path) -> tuple[frozenset[str], str]:
    source = path.read_text()
    nodes = ast.walk(ast.parse(source))
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), source


def references(text: str) -> list[tuple[Path, str]]:
    return [(ROOT / "tests" / file, test) for file, test in re.findall(r"`((?:unit|e2e)/test_\w+\.py)::(test_\w+)`", text)]


def test_every_parameter_has_a_row_and_a_case() -> None:
    fields = {field.name for field in shoal_pb2.SamplingParams.DESCRIPTOR.fields}
    assert fields == CASES.keys() and fields <= rows().keys() and len(rows()) > 30
    others = {field.name for field in shoal_pb2.GenerateRequest.DESCRIPTOR.fields} - {"sampling_params"}
    others |= {field.name for field in shoal_pb2.ChatInput.DESCRIPTOR.fields} | {
        f.name for f in shoal_pb2.ScoreRequest.DESCRIPTOR.fields
    }
    assert others <= rows().keys()


def test_every_http_field_has_a_row() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert not (CHAT_FIELDS | COMPLETION_FIELDS) - named


@pytest.mark.parametrize("name", sorted(rows()))
def test_the_tests_of_a_row_exist_and_speak_of_it(name: str) -> None:
    cells = rows()[name]
    assert all(cells), "no cell is empty"
    found = references(" ".join(cells))
    assert found, "no test is named"
    for path, test in found:
        functions, _ = functions_in(path)
        assert test in functions, f"{path.name} has no {test}"
    assert any(re.search(rf"\b{name}\b", functions_in(path)[1]) for path, _ in found)
