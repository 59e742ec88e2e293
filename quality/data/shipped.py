"""English technical prose that is on every machine that runs Python: read where it lies, copied nowhere. Knows no model.

Deterministic for a Python version and a package's version. The texts are under their packages' own licences (Python's: PSF).
"""

import ast
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from shoal.errors import InvalidConfig
from shoal.quality.data.records import Record

_MIN_DOCSTRING: Final = 60  # characters; shorter ones say little
_STDLIB: Final = "stdlib"


def python_topics(_: str) -> Iterator[Record]:
    """The topics of Python's language reference, as `help('if')` shows them: about 110,000 tokens of prose, some code."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Record(f"python-topics/{name}", text=topics[name])


def docstrings(packages: str) -> Iterator[Record]:
    """Docstrings, one text a module: of the standard library, or of installed packages ("numpy,torch"). Nothing is imported."""
    for package in packages.split(",") if packages else [_STDLIB]:
        root = _root(package)
        files = [root] if root.is_file() else sorted(root.rglob("*.py"))
        for path in files:
            if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(path.relative_to(root.parent).parts):
                continue
            if text := "\n\n".join(docstrings_of(path)):
                yield Record(f"docstrings/{path.relative_to(root.parent)}", text=text)


SHIPPED: Final[dict[str, tuple[Callable[[str], Iterator[Record]], str]]] = {
    "python-topics": (python_topics, "topics of Python's language reference (the default)"),
    "docstrings": (docstrings, "docstrings of the standard library, or of packages, as in docstrings:numpy,torch"),
}


def shipped_records(name: str) -> list[Record]:
    """Texts by name, as in `python-topics` or `docstrings:numpy`. Raises InvalidConfig that lists the names."""
    base, _, options = name.partition(":")
    if base not in SHIPPED or (options and base != "docstrings"):
        known = "; ".join(f"{key}: {words}" for key, (_, words) in SHIPPED.items())
        raise InvalidConfig(f"no data is called {name!r}. Give a .jsonl file, or one of: {known}")
    return list(SHIPPED[base][0](options))


def _root(package: str) -> Path:
    if package == _STDLIB:
        return Path(sysconfig.get_path("stdlib"))
    spec = find_spec(package) if package.isidentifier() and package not in sys.builtin_module_names else None
    if spec is None or spec.origin is None:
        raise InvalidConfig(f"package {package!r} is not installed here; docstrings:… takes names that can be imported")
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin


def docstrings_of(path: Path) -> Iterator[str]:
    """Of a module and what it defines; those that say something, in ASCII. The module is read, not imported."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError, RecursionError):
        return  # a template or a test's broken file: nothing to read there
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= _MIN_DOCSTRING and text.isascii():
                yield text
