"""Makes training text of what is installed: the docstrings of every package, and a part held out by package. Knows no model.

Deterministic for the packages' versions. The texts stay under their packages' licences and are written nowhere but where asked.
"""

import hashlib
import json
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.errors import InvalidConfig
from shoal.quality.data.records import Record
from shoal.quality.data.shipped import docstrings_of

_MIN_CHARACTERS: Final = 200
_MIN_LETTERS: Final = 0.72  # of a docstring's characters letters or blanks: tables, drawings and code have fewer
_SKIPPED: Final = frozenset({"test", "tests", "testing", "_vendor", "vendor", "site-packages", "dist-packages", "idlelib"})
_TOOLS: Final = frozenset({"pip", "setuptools", "pkg_resources", "shoal"})


@dataclass(frozen=True, slots=True)
class CorpusSize:
    """How many texts were written."""

    num_trained: int
    num_held_out: int


def installed_texts(sites: Sequence[Path], hold: Collection[str]) -> Iterator[tuple[bool, Record]]:
    """(held out?, text) of every folder of every package in `sites`, or of where this Python's packages and library lie.

    A docstring that begins like an earlier one is left out, so none of a held-out package comes twice. Nothing is imported.
    """
    seen: set[bytes] = set()
    for site in sites or _own_sites():
        folders: dict[str, list[str]] = {}
        for path in sorted(site.rglob("*.py")):
            parts = path.relative_to(site).parts
            if not _SKIPPED.isdisjoint(parts) or _top(parts) in _TOOLS:
                continue
            for text in docstrings_of(path):
                start = hashlib.sha256(text[:300].encode()).digest()
                if _is_prose(text) and start not in seen:
                    seen.add(start)
                    folders.setdefault("/".join(parts[:-1]) or parts[0], []).append(text)
        for folder, texts in folders.items():
            yield _top(Path(folder).parts) in hold, Record(folder, text="\n\n".join(texts))


def write_corpus(train: Path, held_out: Path, *, sites: Sequence[Path] = (), hold: Collection[str] = ()) -> CorpusSize:
    """Write both parts as JSON lines. Raises InvalidConfig when a file cannot be written."""
    counts = {True: 0, False: 0}
    try:
        with train.open("w", encoding="utf-8") as kept, held_out.open("w", encoding="utf-8") as held:
            for is_held, record in installed_texts(sites, hold):
                counts[is_held] += 1
                (held if is_held else kept).write(json.dumps({"text": record.text, "from": record.where}) + "\n")
    except OSError as error:
        raise InvalidConfig(f"cannot write {error.filename}: {error.strerror}") from error
    return CorpusSize(counts[False], counts[True])


def _is_prose(text: str) -> bool:
    letters = sum(char.isalpha() or char.isspace() for char in text)
    return len(text) >= _MIN_CHARACTERS and letters >= _MIN_LETTERS * len(text)


def _own_sites() -> list[Path]:
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")))


def _top(parts: Sequence[str]) -> str:
    return parts[0].removesuffix(".py")
