"""docs/lifecycle.md draws exactly the states and steps that the code has, and names metrics that exist."""

import re
from enum import Enum
from pathlib import Path

import pytest

from shoal.controller.endpoints import EndpointState
from shoal.decode_worker import request as decode_request
from shoal.decode_worker.request import RequestState
from shoal.errors import InternalError
from shoal.kv_transfer import receiver, sender
from shoal.prefill_worker import task as prefill_task
from shoal.prefill_worker.task import TaskState
from shoal.router.attempt_state import NEXT, AttemptState, Progress
from tests.fakes.cluster import Cluster, request

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "lifecycle.md").read_text()
DIAGRAMS = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", PAGE, re.DOTALL)
OPEN = "[*]"
Step = tuple[str, str]


def drawn(diagram: str) -> set[Step]:
    steps = set()
    for line in diagram.strip().splitlines():
        found = re.fullmatch(r"\s*(\S+) --> (\S+?)(?:: .+)?", line)
        assert found, line
        steps.add((found[1], found[2]))
    return steps


def diagram_of(states: type[Enum]) -> set[Step]:
    """The one diagram that holds exactly these states."""
    names = {state.name for state in states}
    [found] = [drawn(d) for d in DIAGRAMS if {end for step in drawn(d) for end in step} - {OPEN} == names]
    return found


def worker_steps(next_states: dict[Enum, set[Enum]], early: set[Enum]) -> set[Step]:
    return {(state.name, then.name) for state, later in next_states.items() for then in later | early}


def inner(steps: set[Step]) -> set[Step]:
    return {step for step in steps if OPEN not in step}


@pytest.mark.parametrize(
    "states", [AttemptState, RequestState, TaskState, EndpointState, sender._Stage, receiver._Stage], ids=lambda s: s.__module__
)
def test_every_state_has_its_place_in_a_diagram(states: type[Enum]) -> None:
    steps = diagram_of(states)
    assert {then for _, then in steps} | {before for before, _ in steps} >= {state.name for state in states}
    assert any(before == OPEN for before, _ in steps)


def test_the_steps_of_an_attempt_are_the_codes() -> None:
    assert inner(diagram_of(AttemptState)) == {(s.name, then.name) for s, later in NEXT.items() for then in later}


def test_the_steps_of_a_decode_request_are_the_codes() -> None:
    early = {RequestState.CANCELLED, RequestState.FAILED}
    assert inner(diagram_of(RequestState)) == worker_steps(dict(decode_request._NEXT), early)  # type: ignore[arg-type]


def test_the_steps_of_a_prefill_task_are_the_codes() -> None:
    early = {TaskState.CANCELLED, TaskState.FAILED}
    steps = {state: {then} for state, then in prefill_task._NEXT.items()}
    assert inner(diagram_of(TaskState)) == worker_steps(steps, early)  # type: ignore[arg-type]


def test_the_messages_named_exist() -> None:
    protos = "".join(path.read_text() for path in (DOCS.parent / "proto").rglob("*.proto"))
    messages = {"Decode", "Prefill", "Reserved", "SampledTokens", "Finished", "PrefillResponse", "Generate"}
    messages |= {"Open", "Accept", "Reject", "Ready", "Go", "Skip", "Trailer", "Ack", "End"}
    for name in messages:
        assert re.search(rf"\b(message|rpc) {name}\b", protos) and re.search(rf"\b{name}\b", PAGE), name


def test_the_metrics_named_exist() -> None:
    names = set(re.findall(r"`(shoal_\w+)", PAGE))
    listed = set(re.findall(r"^\| `(shoal_\w+)`", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    assert len(names) > 15 and names <= listed


def test_no_step_but_those_drawn() -> None:
    for start in AttemptState:
        for then in AttemptState:
            progress = Progress()
            progress.state, progress.times[start] = start, 0.0
            if then in NEXT.get(start, ()):
                progress.move(then)
                assert progress.state is then and then in progress.times
            else:
                with pytest.raises(InternalError, match=f"from {start} to {then}"):
                    progress.move(then)


async def test_attempts_take_these_steps() -> None:
    seen: list[Progress] = []
    async with Cluster(1, 1, max_retries=0) as cluster:
        dispatcher = cluster.router.service.parts.dispatcher
        make = dispatcher.attempt

        def noting(*args: object) -> object:
            attempt = make(*args)  # type: ignore[arg-type]
            seen.append(attempt.report.progress)
            return attempt

        dispatcher.attempt = noting  # type: ignore[method-assign, assignment]
        await cluster.complete(request(max_tokens=2))
        await cluster.complete(request([5], max_tokens=2))  # one token: nothing to transfer
        cluster.decode[0].delay_s = 0.01
        call = cluster.stub.Generate(request(max_tokens=500, stream=True))
        await call.read()
        call.cancel()
        await cluster.decode[0].idle()
        cluster.prefill[0].error = InternalError("broken")
        await cluster.status(request(max_tokens=2))
    assert [list(progress.times) for progress in seen] == [
        ["reserving", "prefilling", "decoding", "finished"],
        ["reserving", "decoding", "finished"],
        ["reserving", "prefilling", "decoding", "cancelled"],
        ["reserving", "prefilling", "failed"],
    ]
