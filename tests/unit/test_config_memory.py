"""What a container's limit does to the memory that pools may take."""

import os
from pathlib import Path

import pytest

from shoal.config.memory import usable_memory_bytes

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limit(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {"memory.max": "1000000\n"}, 1_000_000),  # a container sees its own group as the root
        ("0::/pod/worker\n", {"pod/memory.max": "2000000\n", "pod/worker/memory.max": "max\n"}, 2_000_000),
        ("0::/pod/worker\n", {"pod/memory.max": "3000000\n", "pod/worker/memory.max": "2000000\n"}, 2_000_000),
        ("4:memory:/pod\n0::/\n", {"memory/pod/memory.limit_in_bytes": "4000000\n"}, 4_000_000),
        ("4:cpu,memory:/elsewhere\n", {"memory/memory.limit_in_bytes": "5000000\n"}, 5_000_000),  # that path is the host's
        ("4:cpu:/pod\n", {"memory/pod/memory.limit_in_bytes": "6000000\n"}, None),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": f"{1 << 62}\n"}, None),  # how the first version says "none"
    ],
)
def test_the_least_limit_holds(tmp_path: Path, own: str, limits: dict[str, str], expected: int | None) -> None:
    (tmp_path / "own").write_text(own)
    for path, text in limits.items():
        limit((tmp_path / "groups" / path).parent, Path(path).name, text)
    found = usable_memory_bytes(tmp_path / "groups", tmp_path / "own")
    assert found == ((MACHINE, "this machine") if expected is None else (expected, "this container"))


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    assert usable_memory_bytes(tmp_path, tmp_path / "none") == (MACHINE, "this machine")
