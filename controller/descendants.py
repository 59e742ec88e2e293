"""No process outlives the one that answers for it. Knows Linux's parent-death signal and subreapers; knows no Ray."""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Get SIGTERM when the thread that made this process ends (Linux). Call between fork and exec."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that `end_descendants` finds them (Linux)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(wait_s: float = 5.0) -> list[str]:
    """Kill and reap every process below this one; return their names. Call when no child is needed any more."""
    import psutil  # here: part of the `serve` extra, as the processes to end are

    me, ended = psutil.Process(), dict[int, str]()
    while descendants := [p for p in me.children(recursive=True) if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                ended[process.pid] = process.name()
                process.kill()
        psutil.wait_procs(descendants, timeout=wait_s)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return list(ended.values())
