"""Whether what came back is what must come back. Pure: outcomes, right answers and strikes in, findings out."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.killer import Hit
from tests.chaos.outcome import Heard, Outcome
from tests.chaos.plan import Deed, Leave, Question
from tests.chaos.reference import Answer

DECLARED = ("Unavailable", "CapacityExceeded")  # what a caller that stays may be told; anything else is ours to explain
LOGPROB_WITHIN = 1e-3
LEG_WITHIN_S = 2.0  # a leg's error ends the other, and the request, within this
Explains = Callable[[Question, int, int, Sequence[int]], bool]  # whether tokens differ only at near ties


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be. No token text, no token ids."""

    kind: str
    request: int | None
    detail: str


@dataclass(slots=True)
class Verdict:
    """Counts by what happened, and everything that must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    error_waits_s: list[float] = field(default_factory=list)  # from a SIGKILL to the error of a request it hit
    resumed_gaps_s: list[float] = field(default_factory=list)  # longest silence of requests that were retried and ended well

    def add(self, kind: str, request: int | None, detail: str) -> None:
        self.violations.append(Violation(kind, request, detail))


def judge(
    outcomes: Sequence[Outcome],
    questions: Sequence[Question],
    answers: Mapping[tuple[int, int], Answer],
    explains: Explains,
    hits: Sequence[Hit],
) -> Verdict:
    """One verdict over all outcomes."""
    verdict = Verdict()
    judged = _Judge(verdict, questions, answers, explains)
    for outcome in outcomes:
        verdict.counts["callers stayed" if outcome.leave is None else f"left by {outcome.leave}"] += 1
        judged.check(outcome)
        if outcome.num_retries:
            verdict.counts["retried or resumed, declared"] += 1
            if not outcome.num_notices:
                verdict.add("silent retry", outcome.index, "a retry without a notice")
            if outcome.whole:
                verdict.resumed_gaps_s.append(outcome.longest_gap_s)
        if outcome.error == "Unavailable" and (wait_s := _wait_s(outcome, hits)) is not None:
            verdict.error_waits_s.append(wait_s)
    for hit in hits:
        if hit.fault:
            verdict.add("strike", None, f"{hit.deed} {hit.name}: {hit.fault}")
    return verdict


@dataclass(frozen=True, slots=True)
class _Judge:
    verdict: Verdict
    questions: Sequence[Question]
    answers: Mapping[tuple[int, int], Answer]
    explains: Explains

    def check(self, outcome: Outcome) -> None:
        """Its end, then every token it brought."""
        counts, leave = self.verdict.counts, outcome.leave
        num_answers = self.questions[outcome.question].n
        finals = sum(heard.final is not None for heard in outcome.heard.values())
        if outcome.error:
            allowed = DECLARED + (("DeadlineExceeded",) if leave is Leave.DEADLINE else ())
            counts[f"{'stayed' if leave is None else 'left'}: {outcome.error}"] += 1
            if outcome.error not in allowed:
                self.verdict.add("undeclared error", outcome.index, f"{outcome.error}: {outcome.words}")
        elif outcome.closed:
            counts["left: closed"] += 1
        elif finals != num_answers:
            self.verdict.add("answers missing", outcome.index, f"{finals} of {num_answers}, and no error")
        else:
            counts["stayed: answered" if leave is None else "left: had ended before, or was aborted"] += 1
        for child, heard in outcome.heard.items():
            self._tokens(outcome, child, heard)

    def _tokens(self, outcome: Outcome, child: int, heard: Heard) -> None:
        question, right = self.questions[outcome.question], self.answers.get((outcome.question, child))
        if right is None:
            self.verdict.add("wrong", outcome.index, f"answer {child} of {question.n}")
            return
        if heard.final is not None and heard.final != tuple(heard.streamed):
            self.verdict.add("stream", outcome.index, f"{len(heard.streamed)} tokens streamed, {len(heard.final)} in the answer")
            return
        got, expected = tuple(heard.streamed), right.token_ids
        is_part = heard.final is None or (heard.reason == "abort" and outcome.leave is Leave.ABORT)
        if got == (expected[: len(got)] if is_part else expected):
            self._scores(outcome, heard, right)
            if not is_part and heard.reason != right.reason:
                self.verdict.add("wrong", outcome.index, f"finish reason {heard.reason}, not {right.reason}")
        elif self.explains(question, outcome.question, child, got):
            self.verdict.counts["near ties"] += 1
        else:
            at = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), len(got))
            detail = (
                f"{question.visibility}, prompt {len(question.prompt_ids)}, temperature {question.temperature}, n {question.n}"
            )
            detail += f", answer {child}, from token {at} of {len(got)} ({len(expected)} expected), retries {outcome.num_retries}"
            self.verdict.add("wrong", outcome.index, detail)

    def _scores(self, outcome: Outcome, heard: Heard, right: Answer) -> None:
        if not self.questions[outcome.question].logprobs:
            return
        if len(heard.logprobs) != len(heard.streamed):
            self.verdict.add("scores", outcome.index, f"{len(heard.logprobs)} for {len(heard.streamed)} tokens")
        elif heard.logprobs:
            off = [abs(own - other) for own, other in zip(heard.logprobs, right.logprobs, strict=False)]
            if not max(off) < LOGPROB_WITHIN:
                places = [at for at, much in enumerate(off) if not much < LOGPROB_WITHIN]
                detail = f"off by up to {max(off):.2e} at tokens {places} of {len(off)}"
                self.verdict.add("scores", outcome.index, f"{detail}, retries {outcome.num_retries}")


def _wait_s(outcome: Outcome, hits: Sequence[Hit]) -> float | None:
    """How long after the kill that it ran into a request ended with its error; None when none was near."""
    deeds = (Deed.KILL, Deed.PAIR, Deed.ROUTER)
    during = [hit.at_s for hit in hits if hit.deed in deeds and outcome.started_s < hit.at_s < outcome.ended_s]
    return outcome.ended_s - max(during) if during else None
