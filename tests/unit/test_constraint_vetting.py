"""Constraints are checked in a process apart: what they do to it is their own refusal, and nobody else's wait for long."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from functools import cache

import pytest

from shoal.constraints import ConstraintVetter
from shoal.errors import InternalError, InvalidRequest, Unavailable
from shoal.model_files import write_random_model
from shoal.types import Constraint, ConstraintKind
from tests.fakes.workers import until
from tests.folders import temporary_folder

GOOD = Constraint(ConstraintKind.REGEX, "[a-z]+")
ENDLESS = Constraint(ConstraintKind.GRAMMAR, "start: R\nR: ~/(.*a.{20}.*)/ & /(.*b.{9}.*){3}/")


@cache
def folder() -> str:
    return str(write_random_model(temporary_folder(), vocab_size=300))


@pytest.fixture
async def vetter() -> AsyncIterator[ConstraintVetter]:
    vetter = ConstraintVetter(folder(), limit_s=1.5)
    yield vetter
    await vetter.close()


def process_id(vetter: ConstraintVetter) -> int:
    assert vetter._process is not None
    return vetter._process.pid


async def test_schemas_that_python_reads_and_the_compiler_does_not_are_refused_in_words(vetter: ConstraintVetter) -> None:
    for text in ('{"items":' * 400 + "{}" + "}" * 400, '{"type":"integer","minimum":1e400}'):
        with pytest.raises(InvalidRequest, match=r"json_schema cannot be read: .*(recursion|range)"):
            await vetter.check(Constraint(ConstraintKind.JSON_SCHEMA, text))
    assert vetter.num_checked == 0


async def test_good_ones_pass_once_and_bad_ones_hear_why(vetter: ConstraintVetter) -> None:
    await asyncio.gather(*(vetter.check(GOOD) for _ in range(20)))
    assert vetter.num_checked == 1
    with pytest.raises(InvalidRequest, match=r"regex: .*unclosed group"):
        await vetter.check(Constraint(ConstraintKind.REGEX, "("))
    with pytest.raises(InvalidRequest, match="regex has 200000 characters"):
        await vetter.check(Constraint(ConstraintKind.REGEX, "a" * 200_000))
    await vetter.check(Constraint(ConstraintKind.REGEX, "日本 \n\"'\\\\" * 5000))
    assert vetter.num_checked == 3


async def test_one_that_never_ends_is_refused_and_the_next_passes(vetter: ConstraintVetter) -> None:
    await vetter.check(GOOD)
    first = process_id(vetter)
    endless = asyncio.create_task(vetter.check(ENDLESS))
    await asyncio.sleep(0)
    await vetter.check(GOOD)  # known: waits for nobody
    assert not endless.done()
    with pytest.raises(InvalidRequest, match=r"grammar takes more than 1\.5 s to compile; simplify it"):
        await endless
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    await vetter.check(Constraint(ConstraintKind.REGEX, "b"))


async def test_a_client_that_leaves_does_not_disturb_the_next(vetter: ConstraintVetter) -> None:
    await vetter.check(GOOD)
    leaving = asyncio.create_task(vetter.check(Constraint(ConstraintKind.REGEX, "(")))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await vetter.check(Constraint(ConstraintKind.REGEX, "c"))  # and does not get the answer meant for "("
    with pytest.raises(InvalidRequest, match="unclosed"):
        await vetter.check(Constraint(ConstraintKind.REGEX, "("))


async def test_a_process_that_dies_is_replaced(vetter: ConstraintVetter) -> None:
    await vetter.check(GOOD)
    process = vetter._process
    assert process is not None
    process.kill()
    await process.wait()
    await vetter.check(Constraint(ConstraintKind.REGEX, "d"))
    dying = vetter._process
    assert dying is not None
    dying.kill()  # its end is not seen yet when the next one is asked
    await vetter.check(Constraint(ConstraintKind.REGEX, "e"))


async def test_one_of_which_the_process_dies_twice_is_refused(vetter: ConstraintVetter) -> None:
    asking = asyncio.create_task(vetter.check(ENDLESS))
    for tries in (1, 2):
        await until(lambda tries=tries: vetter.num_checked == tries)
        os.kill(process_id(vetter), 9)
    with pytest.raises(InvalidRequest, match="grammar asks too much of its compiler"):
        await asking
    await vetter.check(GOOD)


async def test_a_process_that_hangs_is_not_blamed_on_the_constraint(
    vetter: ConstraintVetter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.constraints.vetting._MARGIN_S", 0.1)
    await vetter.check(GOOD)
    os.kill(process_id(vetter), signal.SIGSTOP)
    with pytest.raises(Unavailable, match="does not answer and is started again; try again"):
        await vetter.check(Constraint(ConstraintKind.REGEX, "f"))
    await vetter.check(Constraint(ConstraintKind.REGEX, "f"))


async def test_without_a_model_there_is_no_process() -> None:
    with pytest.raises(InternalError, match="did not start"):
        await ConstraintVetter("/no/such/model").check(GOOD)
