"""A few seconds of `make fuzz`, and that it can fail."""

import time

import pytest

from shoal.errors import InternalError, InvalidRequest
from tests.fuzz.crew import TARGETS, warm_up
from tests.fuzz.draw import Draw
from tests.fuzz.engine import Tally, input_bytes, run_one, run_slice
from tests.fuzz.target import Target


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_is_taken_or_refused_with_words(name: str) -> None:
    warm_up()
    tally = run_slice(TARGETS[name], 1, 0, 400)
    assert not tally.findings, tally.findings
    assert tally.num_inputs == 400 and sum(tally.refused.values()) + tally.num_accepted == 400


def test_the_same_seed_makes_the_same_input() -> None:
    for target in TARGETS.values():
        first, again = (repr(target.make(Draw(input_bytes(target, 7, 3)))) for _ in range(2))
        assert first == again
        assert any(repr(target.make(Draw(input_bytes(target, 8, number)))) != first for number in range(3, 6))


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda given: None, ""),
        (lambda given: _raise(InvalidRequest("no")), ""),
        (lambda given: _raise(InternalError("ours")), "InternalError"),
        (lambda given: _raise(RecursionError()), "RecursionError"),
        (lambda given: _raise(MemoryError()), "MemoryError"),
        (lambda given: _raise(InvalidRequest("no" * 20_000)), "long words"),
        (lambda given: _spend(1.1), "slow"),
    ],
)
def test_what_counts_as_found(call: object, found: str) -> None:
    tally = Tally()
    run_one(Target("toy", 1, lambda draw: draw.byte(), call), b"1", 0, tally)  # type: ignore[arg-type]
    assert len(tally.findings) == bool(found) and all(found in signature for signature in tally.findings)


def _spend(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass
