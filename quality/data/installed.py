"""Makes training text of what is installed: the docstrings of every package, a part held out by package, and documentation beside
them where it is given. Knows no model.

Deterministic for the packages' versions. The texts stay under their packages' licences and are written nowhere but where asked.
"""

import hashlib
import json
import random
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.errors import InvalidConfig
from shoal.quality.data.documents import documents, pieces
from shoal.quality.data.records import Record
from shoal.quality.data.shipped import docstrings_of

_PIECE: Final = 6_000  # characters of a text to train on, about 1,500 tokens
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


def write_corpus(
    train: Path, held_out: Path, *, sites: Sequence[Path] = (), hold: Collection[str] = (), docs: Sequence[Path] = ()
) -> CorpusSize:
    """Write both parts as JSON lines: to train on, pieces of docstrings, and as many of the documentation in `docs` (the larger
    kind is drawn from); held out, docstrings alone, a text a folder. Raises InvalidConfig when a file cannot be written."""
    prose = [piece for record in documents(docs) for piece in pieces(record, _PIECE)]
    code: list[Record] = []
    held: list[Record] = []
    for is_held, record in installed_texts(sites, hold):
        if is_held:
            held.append(record)
        else:
            code.extend(pieces(record, _PIECE))
    kept = [*_drawn(code, len(prose)), *_drawn(prose, len(code))] if docs else code
    try:
        for path, records in ((train, kept), (held_out, held)):
            with path.open("w", encoding="utf-8") as file:
                for record in records:
                    file.write(json.dumps({"text": record.text, "from": record.where}) + "\n")
    except OSError as error:
        raise InvalidConfig(f"cannot write {error.filename}: {error.strerror}") from error
    return CorpusSize(len(kept), len(held))


def _drawn(records: Sequence[Record], count: int) -> list[Record]:
    """`count` of the records in their order, always the same ones; all where there are no more."""
    indices = random.Random(0).sample(range(len(records)), min(count, len(records)))
    return [records[index] for index in sorted(indices)]


def _is_prose(text: str) -> bool:
    letters = sum(char.isalpha() or char.isspace() for char in text)
    return len(text) >= _MIN_CHARACTERS and letters >= _MIN_LETTERS * len(text)


def _own_sites() -> list[Path]:
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")))


def _top(parts: Sequence[str]) -> str:
    return parts[0].removesuffix(".py")
