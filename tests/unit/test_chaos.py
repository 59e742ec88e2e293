"""The chaos tool's own judgement: it must see what it is there to see."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.model_files import write_random_model
from tests.chaos.killer import Hit
from tests.chaos.outcome import Heard, Outcome
from tests.chaos.plan import Deed, Leave, Mix, Moment, Question, make_plan, strikes
from tests.chaos.reference import Answer, Reference
from tests.chaos.samples import Sample, holdings
from tests.chaos.verdict import Verdict, judge
from tests.folders import temporary_folder

MIX = Mix(512, ("full", "speed:2"), (1, 50), (1, 12), 20, 10.0, 48, 2.0)
QUESTION = Question((5, 6, 7), "full", 4, 0.0, 1, 1, logprobs=True, ignore_eos=True)
RIGHT = Answer((10, 11, 12, 13), (-1.0, -2.0, -3.0, -4.0), "length")


def outcome(tokens: tuple[int, ...] = RIGHT.token_ids, *, whole: bool = True, **changes: Any) -> Outcome:
    heard = Heard(list(tokens), list(RIGHT.logprobs[: len(tokens)]), tokens if whole else None, "length" if whole else "")
    return replace(Outcome(0, 0, None, 0.0, 1.0, heard={0: heard} if tokens or whole else {}), **changes)


def verdict(*outcomes: Outcome, hits: tuple[Hit, ...] = (), explains: bool = False) -> Verdict:
    return judge(outcomes, [QUESTION], {(0, 0): RIGHT}, lambda *_: explains, hits)


def kinds(*outcomes: Outcome) -> list[str]:
    return [violation.kind for violation in verdict(*outcomes).violations]


def test_a_plan_is_its_seeds_and_a_fifth_leaves() -> None:
    plan = make_plan(MIX, 2000, 3)
    assert plan == make_plan(MIX, 2000, 3) != make_plan(MIX, 2000, 4)
    leaves = [ask.departure.how for ask in plan.asks if ask.departure is not None]
    assert 0.17 < len(leaves) / 2000 < 0.23 and set(leaves) == set(Leave)
    assert len(plan.questions) == 20 and plan.asks[-1].at_s == pytest.approx(200, rel=0.2)
    some = strikes(1, frozenset({Deed.KILL, Deed.ROUTER}))
    assert {next(some).deed for _ in range(100)} == {Deed.KILL, Deed.ROUTER}


def test_what_is_right_passes() -> None:
    left = outcome((10, 11), whole=False, leave=Leave.TIME, closed=True)
    late = outcome((10,), whole=False, leave=Leave.DEADLINE, error="DeadlineExceeded")
    failed = outcome((10, 11), whole=False, error="Unavailable")
    assert not kinds(outcome(), left, late, failed)
    aborted = outcome((10, 11), leave=Leave.ABORT)
    aborted.heard[0].reason = "abort"
    assert not kinds(aborted)


def test_what_is_wrong_is_found() -> None:
    assert kinds(outcome((10, 99, 12, 13))) == ["wrong"]
    assert kinds(outcome((10, 11, 12))) == ["wrong"]  # too short
    assert kinds(outcome((10, 12), whole=False, leave=Leave.TIME, closed=True)) == ["wrong"]  # a gap
    repeated = outcome()
    repeated.heard[0].streamed = [10, 10, 11, 12, 13]
    assert kinds(repeated) == ["stream"]
    off = outcome()
    off.heard[0].logprobs[2] += 0.01
    assert kinds(off) == ["scores"]
    assert kinds(outcome((), whole=False)) == ["answers missing"]
    assert kinds(outcome((), whole=False, error="InternalError")) == ["undeclared error"]
    assert kinds(outcome((), whole=False, error="DeadlineExceeded")) == ["undeclared error"]  # a caller that stays has a minute
    assert kinds(outcome(num_retries=1)) == ["silent retry"]
    assert not verdict(outcome((10, 99, 12, 13)), explains=True).violations


def test_errors_are_timed_from_the_kill_they_ran_into() -> None:
    hit = Hit(Deed.KILL, "decode-0", Moment.ANY, 0.4, fault="restarted with it: decode-1")
    found = verdict(outcome((), whole=False, error="Unavailable"), hits=(hit,))
    assert found.error_waits_s == [pytest.approx(0.6)] and [violation.kind for violation in found.violations] == ["strike"]


def test_near_ties_are_told_from_wrong_tokens() -> None:
    reference = Reference(str(write_random_model(temporary_folder())))
    sampled = replace(QUESTION, temperature=1.0, max_tokens=6, logprobs=False)
    reference.answer_all([sampled])
    right = reference.answers[0, 0].token_ids
    assert reference.explains(sampled, 0, 0, right[:4])
    for at in range(6):
        assert not reference.explains(sampled, 0, 0, (*right[:at], (right[at] + 1) % 512, *right[at + 1 :]))
    # a tie made by hand: the expectation is changed to a token that 1e-4 away from the truth could not be told from
    reference.answers[0, 0] = replace(reference.answers[0, 0], token_ids=((right[0] + 1) % 512, *right[1:]))
    assert reference.explains(sampled, 0, 0, right)


def test_growth_is_told_from_noise() -> None:
    def course(growth_per_s: float, fds: float = 0.0) -> list[str]:
        samples = [
            Sample(at, int(100e6 + growth_per_s * at + 1e6 * (at % 3)), int(50 + fds * at + at % 2), 20, 0)
            for at in range(0, 1800, 10)
        ]
        return holdings("router", samples).faults

    assert course(0.0) == [] == course(1e3)  # 1.2 MB
    assert course(5e3) == ["memory grows by 6.0 MB"]
    assert course(0.0, fds=0.01) == ["file descriptors grow by 11.8"]
