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


def check_threads(num_threads: int) -> None:
    """Raise InvalidConfig when a worker would have more threads than this process has CPUs."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_threads > num_cpus:
        raise InvalidConfig(f"--threads-per-worker {num_threads} exceeds the {num_cpus} CPUs that may be used here; lower it")


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
