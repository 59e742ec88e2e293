"""Makes training text of what is installed: the docstrings of every package, and a held-out part by package. Knows no model.

Deterministic for the packages' versions; the texts stay under their packages' licences and are written nowhere but where asked:

    python -m shoal.quality.tune.corpus train.jsonl --held-out held.jsonl --hold scipy,networkx [--site FOLDER ...]
"""

import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click

from shoal.cli.failure import told_in_one_line
from shoal.errors import InvalidConfig
from shoal.quality.data import Record

_MIN_CHARACTERS: Final = 200
_MIN_LETTERS: Final = 0.72  # of a docstring's characters letters or blanks: tables, ASCII art and code have fewer
_SKIPPED: Final = frozenset({"test", "tests", "testing", "_vendor", "vendor", "site-packages", "dist-packages", "idlelib"})
_TOOLS: Final = frozenset({"pip", "setuptools", "pkg_resources", "shoal"})


def installed_texts(sites: Sequence[Path] = (), *, hold: frozenset[str] = frozenset()) -> Iterator[tuple[bool, Record]]:
    """(held out?, text) of every folder of every package in `sites`, or where this Python's packages and library lie.

    A docstring that begins as an earlier one is left out, so nothing of a held-out package can come twice. Nothing is imported.
    """
    seen: set[bytes] = set()
    for site in sites or _own_sites():
        folders: dict[str, list[str]] = {}
        for path in sorted(site.rglob("*.py")):
            parts = path.relative_to(site).parts
            if not _SKIPPED.isdisjoint(parts) or _top(parts) in _TOOLS:
                continue
            for text in _docstrings(path):
                start = hashlib.sha256(text[:300].encode()).digest()
                if start not in seen:
                    seen.add(start)
                    folders.setdefault("/".join(parts[:-1]) or parts[0], []).append(text)
        for folder, texts in folders.items():
            yield _top(Path(folder).parts) in hold, Record(folder, text="\n\n".join(texts))


def _own_sites() -> list[Path]:
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")))


def _top(parts: Sequence[str]) -> str:
    return parts[0].removesuffix(".py")


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError, RecursionError):
        return  # a template or a test's broken file: nothing to read there
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            letters = sum(char.isalpha() or char.isspace() for char in text)
            if len(text) >= _MIN_CHARACTERS and text.isascii() and letters >= _MIN_LETTERS * len(text):
                yield text


@click.command()
@click.argument("train", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--held-out", type=click.Path(path_type=Path, dir_okay=False), help="Where the held-out texts go.")
@click.option("--hold", default="scipy,networkx,astropy", show_default=True, help="Packages that are never trained on.")
@click.option("--site", "sites", multiple=True, type=click.Path(path_type=Path, exists=True), help="Folders of packages.")
def command(train: Path, held_out: Path | None, hold: str, sites: tuple[Path, ...]) -> None:
    """Write the docstrings of installed packages as JSON lines that `shoal tune --data` and `shoal eval --data` take."""
    with told_in_one_line():
        counts = {True: 0, False: 0}
        try:
            with train.open("w") as kept, (held_out or Path("/dev/null")).open("w") as held:
                for is_held, record in installed_texts(sites, hold=frozenset(hold.split(","))):
                    counts[is_held] += 1
                    (held if is_held else kept).write(json.dumps({"text": record.text, "from": record.where}) + "\n")
        except OSError as error:
            raise InvalidConfig(f"cannot write {error.filename}: {error.strerror}") from error
        click.echo(f"{counts[False]} texts to train on, {counts[True]} held out")


if __name__ == "__main__":
    command()
