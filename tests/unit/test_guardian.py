"""The controller's guardian: whatever way its child ends, what the child left ends too, and the exit status is the child's."""

import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")

PROGRAM = """
import os, signal, subprocess, sys
from shoal.controller.guardian import guard
guard()
orphan = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
print(os.getpid(), orphan.pid, int(orphan.stdout.readline()), flush=True)
{end}
"""


def _run(end: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(end=end)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    return process, [alive for pid in pids if (alive := _process(pid)) is not None]


def _process(pid: int) -> psutil.Process | None:
    """The process, or None when it has ended already (it may end while it is looked at)."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


@pytest.mark.parametrize(
    ("end", "status"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os.kill(os.getpid(), signal.SIGSEGV)", -11)],
)
def test_what_the_child_leaves_ends_with_it(end: str, status: int) -> None:
    process, below = _run(end)
    assert process.wait(20) == status
    assert not psutil.wait_procs(below, timeout=5)[1]


def test_sigterm_reaches_the_child() -> None:
    process, below = _run("signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); print('set', flush=True); signal.pause()")
    assert process.stdout is not None and process.stdout.readline() == "set\n"
    process.terminate()
    assert process.wait(20) == 3
    assert not psutil.wait_procs(below, timeout=5)[1]


def test_a_killed_guardian_takes_its_child_along() -> None:
    process, (child, *orphans) = _run("signal.pause()")
    process.kill()
    process.wait(5)
    deadline = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    for orphan in orphans:  # nobody is left to end them: in a cluster their pipes and Ray's own checks do
        orphan.kill()
