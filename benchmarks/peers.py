"""Engines to measure, each a process of its own that speaks lines.py. Knows processes; knows no tables.

Only the one being asked runs: the others are stopped by signal, so that no thread that waits busily disturbs it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_DRIVERS = Path(__file__).parent / "drivers"


@dataclass(frozen=True, slots=True)
class PeerKind:
    """How to start a peer: which program, under whose Python, and with what it differs from the other options."""

    name: str
    driver: str
    module: str  # that its Python must have
    python_variable: str | None  # environment variable that names its Python; None: this one
    options: Mapping[str, str] = field(default_factory=dict)


KINDS: dict[str, PeerKind] = {
    kind.name: kind
    for kind in (
        PeerKind("shoal", "shoal_driver.py", "shoal", None),
        PeerKind("vllm", "vllm_driver.py", "vllm", "SHOAL_BENCH_VLLM"),
        PeerKind("llama.cpp", "llama_driver.py", "llama_cpp", "SHOAL_BENCH_LLAMA", {"gguf": "gguf_bf16"}),
        PeerKind("llama.cpp Q4_1", "llama_driver.py", "llama_cpp", "SHOAL_BENCH_LLAMA", {"gguf": "gguf_packed"}),
        PeerKind("transformers", "transformers_driver.py", "transformers", "SHOAL_BENCH_TRANSFORMERS"),
    )
}


class PeerFailed(Exception):
    """It did not start or did not answer; the message says why in one line."""


def find_python(kind: PeerKind) -> str:
    """The Python that has the engine. Raises PeerFailed that says what to set."""
    python = os.environ.get(kind.python_variable or "") or sys.executable
    if not Path(python).exists():
        raise PeerFailed(f"{kind.python_variable}={python} does not exist")
    found = subprocess.run([python, "-c", f"import {kind.module}"], capture_output=True, check=False)
    if found.returncode:
        where = f"name a Python that has it in {kind.python_variable}" if kind.python_variable else "install this checkout"
        raise PeerFailed(f"no module {kind.module} for {python}; {where}")
    return python


class Peer:
    """One running engine."""

    def __init__(self, kind: PeerKind, options: Mapping[str, Any], log: Path) -> None:
        self.kind = kind
        python = find_python(kind)
        own = {key: options[value] for key, value in kind.options.items()}
        environment = os.environ | {"OMP_NUM_THREADS": str(options["threads"])}
        path = f"{Path(python).parent}{os.pathsep}{environment.get('PATH', '')}"  # a venv's compilers and tools
        self._log = log
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                [python, str(_DRIVERS / kind.driver)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment | {"PATH": path},
                start_new_session=True,
            )
        self.about: str = self._exchange({**options, **own})["ready"]
        self._signal(signal.SIGSTOP)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[float]]:
        """Seconds from the hand-over at which each prompt got each of its tokens."""
        self._signal(signal.SIGCONT)
        try:
            marks: list[list[float]] = self._exchange({"prompts": prompts, "num_tokens": num_tokens})["marks"]
            return marks
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it and what it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            last = [text for text in self._log.read_text(errors="replace").splitlines() if text.strip()] or ["nothing was said"]
            raise PeerFailed(f"{self.kind.name} ended: {last[-1].strip()} (all of it: {self._log})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return
