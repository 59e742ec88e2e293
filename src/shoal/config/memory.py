"""How much memory this process may use: the machine's, or less where a container's limit (cgroup) says so. Linux tells."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")


def usable_memory_bytes(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> tuple[int, str]:
    """The least of what the machine has and any control group that this process is in allows, and whose it is, in words."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = min(_limits(cgroups, own), default=machine)
    return (limit, "this container") if limit < machine else (machine, "this machine")


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    """Of the process's groups and all above them; both versions of the interface, which a machine may mix."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        leaf = root / path.lstrip("/")  # a container that sees only its own groups finds them at the root
        for group in (leaf, *leaf.parents):
            if group.is_relative_to(root) and (limit := _read(group / name)) is not None:
                yield limit


def _read(path: Path) -> int | None:
    """None for "max", and where there is no such group."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
