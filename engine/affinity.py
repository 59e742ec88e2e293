"""Keeps a process on given CPUs. Knows Linux; knows no model and no pool."""

import os
from collections.abc import Collection
from pathlib import Path

from shoal.errors import InvalidConfig


def check_cpus(cpus: Collection[int]) -> None:
    """Raise InvalidConfig unless this process may run on every one of these CPUs."""
    if not cpus:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise InvalidConfig("this system cannot keep a process on given CPUs; leave prefill_cpus and decode_cpus out")
    usable = os.sched_getaffinity(0)
    if missing := sorted(set(cpus) - usable):
        raise InvalidConfig(f"CPU {missing[0]} is not among those that may be used here ({_text(usable)}); name others")


def keep_to_cpus(cpus: Collection[int]) -> None:
    """Let every thread of this process, and all that they start, run on these CPUs only; none given: leave them alone."""
    check_cpus(cpus)
    for thread in Path("/proc/self/task").iterdir() if cpus else ():
        try:
            os.sched_setaffinity(int(thread.name), cpus)
        except ProcessLookupError:
            continue  # it has ended meanwhile


def _text(cpus: Collection[int]) -> str:
    return ", ".join(map(str, sorted(cpus)))
