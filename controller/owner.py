"""Whose files in a shared folder are: a process, known by its pid and the moment it began. Knows /proc; deletes nothing."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from shoal.rpc.hosted import process_host

RAY_PREFIX: Final = "shoal-ray-"  # of the folder of a local Ray
SHORT_FOLDER: Final = (
    "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
)  # a Unix socket's path has 107 characters at most
FOLDER_MARK: Final = "owner"  # the file in a temporary folder that says whose it is


@dataclass(frozen=True, slots=True)
class Owner:
    """One process. `began` tells it from a later one with the same pid; `host` is where pids mean something."""

    pid: int
    began: str
    host: str

    @classmethod
    def me(cls) -> Self:
        return cls(os.getpid(), _began(os.getpid()), process_host())

    @classmethod
    def read(cls, text: str) -> Self | None:
        """What `str` wrote; None for anything else."""
        parts = text.split()
        return cls(int(parts[0]), parts[1], parts[2]) if len(parts) == 3 and parts[0].isdigit() else None

    def __str__(self) -> str:
        return f"{self.pid} {self.began} {self.host}"

    @property
    def is_gone(self) -> bool:
        """Whether it has certainly ended. Of a process elsewhere nothing is certain."""
        return self.host == process_host() and _began(self.pid) != self.began


def mark(path: Path) -> None:
    """Say that this process owns the folder that `path` lies in; the mark appears whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(str(Owner.me()), encoding="utf-8")
    new.rename(path)


def _began(pid: int) -> str:
    """In the kernel's ticks since boot; "" when there is no such process; "?" where that cannot be seen."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return ""
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "?"
