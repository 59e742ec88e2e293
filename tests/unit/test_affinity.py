"""A process kept to a CPU is kept there with every thread, also those that ran before."""

import subprocess
import sys

import pytest

from shoal.engine.affinity import check_cpus
from shoal.errors import InvalidConfig

PROGRAM = """
import os, threading
from pathlib import Path
from shoal.engine.affinity import keep_to_cpus
stop = threading.Event()
threading.Thread(target=stop.wait).start()
cpu = min(os.sched_getaffinity(0))
keep_to_cpus((cpu,))
threading.Thread(target=stop.wait).start()
print({tuple(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()} == {(cpu,)})
stop.set()
"""


def test_every_thread_is_kept() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=True)
    assert told.stdout.strip() == "True"


def test_a_cpu_that_is_not_there_is_named() -> None:
    check_cpus(())
    with pytest.raises(InvalidConfig, match="CPU 4000 is not among"):
        check_cpus((4000,))
