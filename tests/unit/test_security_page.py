"""docs/security.md names the tests that hold its rules; they must exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) >= 15
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{file} has no {name}"


def test_every_flag_of_security_is_explained() -> None:
    from shoal.cli.serve_options import HELP

    flags = ["--" + name.replace("_", "-") for name in HELP if name.startswith(("tls", "cluster", "tokens"))]
    assert len(flags) == 9 and not [flag for flag in flags if flag not in PAGE]
