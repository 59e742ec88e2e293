"""Prose out of documentation as it lies in a source distribution: the paragraphs of its .rst, .txt and .md files. Knows no model.

Only paragraphs that read as prose are kept: no tables, code or directives. What is written stays under the documents' licences.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Final

from shoal.errors import InvalidConfig
from shoal.quality.data.records import Record

_SUFFIXES: Final = frozenset({".rst", ".txt", ".md"})
_SKIPPED: Final = frozenset({"locale", "_static", "_build"})
_MIN_PARAGRAPH: Final = 80  # characters; headings and labels are shorter
_MIN_DOCUMENT: Final = 3_000  # characters that are left of a file
_MIN_LETTERS: Final = 0.9  # of a paragraph's characters letters or blanks
_ROLE: Final = re.compile(r":[a-z:]+:`[~!.]?(?:([^`<]*?)\s*<[^`]*>|([^`]*))`")  # :meth:`~a.b` and :ref:`words <target>`


def documents(folders: Sequence[Path]) -> Iterator[Record]:
    """One text a file, in the order of paths. Raises InvalidConfig for a folder that is not there."""
    for folder in folders:
        if not folder.is_dir():
            raise InvalidConfig(f"{folder} is no folder of documentation; unpack a source distribution and name its docs folder")
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if path.suffix not in _SUFFIXES or not path.is_file() or not _SKIPPED.isdisjoint(parts):
                continue
            text = "\n\n".join(paragraphs(path.read_text(encoding="utf-8", errors="replace")))
            if len(text) >= _MIN_DOCUMENT:
                yield Record("/".join(parts), text=text)


def paragraphs(source: str) -> Iterator[str]:
    """The paragraphs that are prose, without indentation and without Sphinx's roles around words."""
    for block in re.split(r"\n\s*\n", source):
        found = dedent(_ROLE.sub(lambda match: match[1] or match[2], block.strip("\n"))).strip()
        letters = sum(char.isalpha() or char.isspace() for char in found)
        is_prose = len(found) >= _MIN_PARAGRAPH and letters >= _MIN_LETTERS * len(found)
        if is_prose and found.isascii() and found.endswith((".", ":", "?", "!")) and not found.startswith(".."):
            yield re.sub(r"::$", ":", found)


def pieces(record: Record, size: int) -> Iterator[Record]:
    """A text in pieces of about `size` characters, cut between paragraphs, so that a few tokens come from many places. A last
    piece of less than half the size is left out, but for a text that is one piece."""
    kept: list[str] = []
    number = 0
    for paragraph in (record.text or "").split("\n\n"):
        kept.append(paragraph)
        if sum(map(len, kept)) >= size:
            number += 1
            yield Record(f"{record.where}#{number}", text="\n\n".join(kept))
            kept = []
    if kept and (not number or sum(map(len, kept)) >= size // 2):
        yield Record(f"{record.where}#{number + 1}", text="\n\n".join(kept))
