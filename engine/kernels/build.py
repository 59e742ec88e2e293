"""Compiles the kernels once per machine, source and torch version. Knows g++ and a cache folder; loads nothing.

The library's name is the digest of all that went into it, so a stale one is never found. Builders of the same library wait
for one another; the finished file appears by one rename.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from shoal.engine.kernels.cpu import InstructionSet, cpu_features
from shoal.model_files.cache import cache_root

SOURCES = Path(__file__).parent / "source"
_FLAGS = (
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-fopenmp",
    "-mamx-tile",
    "-mamx-bf16",
    "-fno-math-errno",
    "-fvisibility-inlines-hidden",
    "-DNDEBUG",
    "-w",
)
_TARGETS = {
    InstructionSet.AVX512: ("-march=x86-64-v4", "-mavx512bf16"),
    InstructionSet.AVX2: ("-march=x86-64-v3",),
}
_TIMEOUT_S = 600


class BuildFailed(Exception):
    """No library; the message says why, in one line."""


def build(instructions: InstructionSet, folder: Path | None = None) -> Path:
    """The library compiled for these instructions, made now if it is not there yet. Raises BuildFailed."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise BuildFailed("no C++ compiler found (g++, or the one CXX names)")
    folder = folder or cache_root() / "kernels"
    flags = (*_FLAGS, *_TARGETS[instructions])
    try:
        target = folder / f"shoal-kernels-{_digest(compiler, flags)}.so"
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    os.replace(_compile(compiler, flags, Path(scratch)), target)
        return target
    except OSError as error:
        raise BuildFailed(f"cannot use the cache folder {folder}: {error.strerror}; set SHOAL_CACHE_DIR") from error


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    parts = [version, " ".join(flags).encode(), torch.__version__.encode(), " ".join(sorted(cpu_features())).encode()]
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            parts += [path.name.encode(), path.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, flags: tuple[str, ...], scratch: Path) -> Path:
    """All sources at the same time, and one library of them."""
    jobs: dict[str, subprocess.Popen[str]] = {}
    for source in sorted(SOURCES.glob("*.cpp")):
        command = [compiler, *flags, "-c", str(source), "-o", str(scratch / f"{source.stem}.o")]
        jobs[source.stem] = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    failed = {name: text for name, job in jobs.items() if (text := _finish(job))}
    if failed:
        name, text = next(iter(failed.items()))
        raise BuildFailed(f"{compiler} cannot compile {name}.cpp: {text}")
    library = scratch / "library.so"
    objects = [str(scratch / f"{name}.o") for name in jobs]
    error = _finish(
        subprocess.Popen([compiler, "-shared", "-o", str(library), *objects, str(_openmp())], stderr=subprocess.PIPE, text=True)
    )
    if error:
        raise BuildFailed(f"{compiler} cannot link the kernels: {error}")
    return library


def _finish(job: subprocess.Popen[str]) -> str:
    """The first line of what went wrong, or nothing."""
    try:
        _, errors = job.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        job.kill()
        return f"not finished after {_TIMEOUT_S} s"
    lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines() or ["unknown error"]
    return "" if job.returncode == 0 else lines[0]


def _openmp() -> Path:
    """The OpenMP runtime that torch has loaded: a second one would bring a second set of threads."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libgomp"):
            return path
    raise BuildFailed("torch has loaded no GNU OpenMP runtime")
