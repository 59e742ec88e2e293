"""docs/quality.md: its commands have the flags it writes, its pictures are there, and it names what the commands offer."""

import re
import shlex
from pathlib import Path

from shoal.cli.diagnose import diagnose
from shoal.cli.evaluate import TASKS, evaluate
from shoal.quality.data import SHIPPED

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "quality.md").read_text()
COMMANDS = {"diagnose": diagnose, "eval": evaluate}


def test_every_flag_is_a_flag() -> None:
    lines = re.findall(r"^\$ shoal (diagnose|eval) (.*)$", TEXT, re.MULTILINE)
    assert len(lines) >= 8
    for name, rest in lines:
        known = {text for parameter in COMMANDS[name].params for text in parameter.opts}
        used = [part for part in shlex.split(rest.partition("#")[0]) if part.startswith("-")]
        assert set(used) <= known, (name, set(used) - known)


def test_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", TEXT)
    assert len(pictures) == 2
    assert all(1000 < (DOCS / name).stat().st_size < 200_000 for name in pictures)


def test_what_is_offered_is_explained() -> None:
    assert all(name in TEXT for name in (*TASKS, *SHIPPED))
    assert "@@" not in TEXT
