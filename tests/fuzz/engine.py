"""Runs inputs of one target and keeps what it finds. Knows seeds, time and memory; knows no parser.

Input number i of a target is made from bytes that the seed, the target's name and i determine, so each can be made again alone.
"""

import random
import resource
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from shoal.errors import InternalError, ShoalError
from tests.fuzz.draw import Draw
from tests.fuzz.target import Target

MAX_SECONDS = 1.0
MAX_GROWTH_BYTES = 1 << 30  # of one process's address space
_LENGTHS = (16, 48, 120, 120, 300, 300, 1000)


@dataclass(slots=True)
class Tally:
    """What came of some inputs. `findings` maps a signature to the number of the first input that had it and its words."""

    num_inputs: int = 0
    num_accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by error class
    findings: dict[str, tuple[int, str]] = field(default_factory=dict)
    slowest_s: float = 0.0
    resident_bytes: int = 0

    def add(self, other: "Tally") -> None:
        self.num_inputs += other.num_inputs
        self.num_accepted += other.num_accepted
        self.refused += other.refused
        for signature, found in other.findings.items():
            self.findings.setdefault(signature, found)
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.resident_bytes = max(self.resident_bytes, other.resident_bytes)


def bound_memory() -> None:
    """An input that asks for more ends in MemoryError, which is a finding."""
    limit = psutil.Process().memory_info().vms + MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def input_bytes(target: Target, seed: int, number: int) -> bytes:
    source = random.Random(f"{seed}/{target.name}/{number}")  # reproducible on purpose
    return source.randbytes(source.choice(_LENGTHS))


def run_one(target: Target, data: bytes, number: int, tally: Tally) -> None:
    """One input; what it ends with goes into the tally."""
    given = target.make(Draw(data))
    began = time.thread_time()
    error: BaseException | None = None
    try:
        target.call(given)
    except (Exception, RecursionError, MemoryError) as caught:  # noqa: BLE001  # that is the question
        error = caught
    seconds = time.thread_time() - began
    tally.num_inputs += 1
    tally.slowest_s = max(tally.slowest_s, seconds)
    if seconds > MAX_SECONDS:
        tally.findings.setdefault(f"slow: {target.name}", (number, f"took {seconds:.1f} s: {_short(given)}"))
    if error is None:
        tally.num_accepted += 1
    elif isinstance(error, ShoalError) and not isinstance(error, InternalError):
        tally.refused[type(error).__name__] += 1
        if len(str(error)) > MAX_WORDS:
            tally.findings.setdefault(f"long words: {target.name}: {str(error)[:40]}", (number, f"{len(str(error))} characters"))
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        ours = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if "/tests/" not in f.filename and "site-packages" not in f.filename
        ]
        where = ours[-1] if ours else frame
        place = f"{where.filename.split('/src/')[-1]}:{where.lineno}"
        words = f"{type(error).__name__}: {str(error)[:200]} at {place} for {_short(given)}"
        tally.findings.setdefault(f"{target.name}: {type(error).__name__} at {place}", (number, words))


MAX_WORDS = 20_000  # characters of an error: what is refused may be quoted, but not at any length


def run_slice(target: Target, seed: int, start: int, stop: int, told: Callable[[int], None] = lambda count: None) -> Tally:
    """Inputs start … stop − 1."""
    tally, last = Tally(), time.monotonic()
    for number in range(start, stop):
        run_one(target, input_bytes(target, seed, number), number, tally)
        if time.monotonic() - last > 0.3:
            told(tally.num_inputs)
            last = time.monotonic()

    tally.resident_bytes = psutil.Process().memory_info().rss
    return tally


def _short(given: object) -> str:
    return repr(given)[:300]
