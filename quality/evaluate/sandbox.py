"""Runs a Python program that nobody has read: another process, no files to write, little memory, little time, no network.

It is a fence for a small model's mistakes, not a prison for an attacker: the process has the caller's user and can read what that
user can read. Where the system allows it, it has a network namespace of its own, with nothing in it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from typing import Final

_MEMORY_BYTES: Final = 1 << 30
_PASSED: Final = "the program has ended"
_BOOTSTRAP: Final = """
import resource, sys
for kind, most in ((resource.RLIMIT_CPU, {seconds}), (resource.RLIMIT_AS, {memory}), (resource.RLIMIT_FSIZE, 0),
                   (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0)):
    resource.setrlimit(kind, (most, most))
program, out = sys.stdin.read(), sys.stdout
sys.stdout = sys.stderr
exec(compile(program, "completion", "exec"), {{"__name__": "__main__"}})
out.write({passed!r})
out.flush()
"""


def runs_well(program: str, *, timeout_s: float = 5.0) -> bool:
    """Whether the program comes to its end, in time, without an exception; one that exits early has not."""
    seconds = max(1, round(timeout_s) + 1)
    bootstrap = _BOOTSTRAP.format(seconds=seconds, memory=_MEMORY_BYTES, passed=_PASSED)
    with tempfile.TemporaryDirectory(prefix="shoal-sandbox-") as folder:
        process = subprocess.Popen(
            [*_without_network(), sys.executable, "-I", "-S", "-B", "-c", bootstrap],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin"},
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(program.encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
        return process.returncode == 0 and out.decode(errors="replace") == _PASSED


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it may have started."""
    with contextlib.suppress(ProcessLookupError):  # it may have ended, and its group with it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@cache
def _without_network() -> tuple[str, ...]:
    """What to put before a command so that it has no network, where this user may do that; else nothing."""
    command = ("unshare", "--net", "--")
    try:
        done = subprocess.run([*command, "true"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return command if done.returncode == 0 else ()
