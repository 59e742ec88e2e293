"""Balancing: least outstanding token-layers, ties at random, equal fingerprints, allowed visibilities, words when nobody can."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from shoal.errors import Unavailable
from shoal.placement.balance import WorkerLoadView, choose_pair, choose_worker
from shoal.types import DType, Fingerprint
from shoal.visibility import Visibility

OLD = Fingerprint("rev-a", "", 30, 576, 3, 64, DType.FLOAT32, 16, "theta=1e5", 8 << 20, 2048)
NEW = replace(OLD, revision="rev-b")
FULL = Visibility().resolve(30)
SPEED = Visibility.parse("speed:22").resolve(30)


def worker(
    name: str, load: int = 0, *, allow: str = "full,speed:22", fingerprint: Fingerprint = OLD, **fields: object
) -> WorkerLoadView:
    view = WorkerLoadView(name, fingerprint, frozenset(Visibility.parse(text) for text in allow.split(",")), 16, load)
    return replace(view, **fields)  # type: ignore[arg-type]


def choose(workers: list[WorkerLoadView], visibility: Visibility = SPEED, seed: int = 0) -> str:
    return choose_worker(workers, visibility, random.Random(seed), pool="decode").worker_id


def test_least_outstanding_work_wins() -> None:
    assert choose([worker("a", 300), worker("b", 20), worker("c", 21)]) == "b"


def test_ties_are_broken_at_random_and_repeatably() -> None:
    workers = [worker("a", 5), worker("b", 5), worker("c", 6), worker("d", 5)]
    rng = random.Random(1)
    counts = Counter(choose_worker(workers, SPEED, rng, pool="decode").worker_id for _ in range(600))
    assert set(counts) == {"a", "b", "d"} and min(counts.values()) > 150
    assert choose(workers, seed=7) == choose(workers, seed=7)


def test_busy_but_allowed_beats_idle_and_not_allowed() -> None:
    assert choose([worker("a", 10**9), worker("b", allow="full"), worker("c", is_ready=False)]) == "a"


@pytest.mark.parametrize(
    ("allowed", "asked", "yes"),
    [
        ("speed:22", "speed:22:boundary=3", True),  # b is not part of the policy
        ("speed:22", "speed:22:boundary=16", True),
        ("speed:22", "speed:22:boundary=17", False),  # but bounded
        ("speed:22", "speed:21", False),
        ("speed:22", "speed:22:anchors=2", False),
        ("speed:22", "speed:22:sink", False),
        ("pop:22", "pop:22:late", False),
        ("pop:30", "full", True),  # K = L is full, on either side
        ("full", "speed:30:anchors=4", True),
        ("full:boundary=9", "full:boundary=2", True),
        ("full", "speed:22", False),
        ("pop:31", "full", False),  # an entry too deep for this model matches nothing
        ("full", "pop:31", False),
    ],
)
def test_allow_list(allowed: str, asked: str, yes: bool) -> None:
    assert worker("a", allow=allowed).allows(Visibility.parse(asked)) is yes


def test_nobody_is_explained() -> None:
    with pytest.raises(Unavailable, match="no decode worker is known"):
        choose([])
    workers = [worker("a", is_ready=False), worker("b", allow="full,pop:4:late"), worker("c")]
    with pytest.raises(Unavailable) as caught:
        choose_worker(workers, SPEED, random.Random(0), pool="decode", excluded=frozenset({"c"}))
    assert str(caught.value) == (
        "no decode worker can take this request: a not ready; b does not allow speed:22:boundary=1 (allows full, pop:4:late, "
        "boundary up to 16); c just failed this request"
    )
    with pytest.raises(Unavailable, match="and 3 more"):
        choose([worker(str(index), is_ready=False) for index in range(7)])
    with pytest.raises(Unavailable, match="a differs in revision: rev-b != rev-a"):
        choose_worker([worker("a", fingerprint=NEW)], SPEED, random.Random(0), pool="prefill", fingerprint=OLD)


def test_pair_has_equal_fingerprints_during_an_upgrade() -> None:
    decoders = [worker("d-old", 50), worker("d-new", 10, fingerprint=NEW)]
    prefillers = [worker("p-old", 0), worker("p-new", 500, fingerprint=NEW)]
    pair = choose_pair(decoders, prefillers, SPEED, random.Random(0))
    assert pair.prefill is not None and (pair.decode.worker_id, pair.prefill.worker_id) == ("d-new", "p-new")
    pair = choose_pair(decoders, prefillers[:1], SPEED, random.Random(0))  # the new one has no partner
    assert pair.prefill is not None and (pair.decode.worker_id, pair.prefill.worker_id) == ("d-old", "p-old")


def test_pair_needs_both_to_allow() -> None:
    decoders = [worker("d", allow="full,speed:22")]
    with pytest.raises(Unavailable, match=r"no prefill worker can take this request: p does not allow full"):
        choose_pair(decoders, [worker("p", allow="speed:22")], FULL, random.Random(0))
    with pytest.raises(Unavailable, match="no decode worker is known"):
        choose_pair([], [worker("p")], FULL, random.Random(0))
    with pytest.raises(Unavailable, match="d and p differ in revision: rev-a != rev-b; start both pools with the same model"):
        choose_pair(decoders, [worker("p", fingerprint=NEW)], FULL, random.Random(0))


def test_no_prefill_worker_is_needed_without_prefill_tokens() -> None:
    pair = choose_pair([worker("d")], [], SPEED, random.Random(0), needs_prefill=False)
    assert pair.prefill is None and pair.decode.worker_id == "d"
