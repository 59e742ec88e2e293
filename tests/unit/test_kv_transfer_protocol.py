"""The pair's protocol over random interleavings: order, quarantine, one end per attempt, every buffer back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import Cancelled, Unavailable
from tests.fakes.transfer import Pair, toy_plan

CUTS = ("none", "sender", "receiver", "both", "close")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_interleaving_with_cancels_and_closing(data: st.DataObject) -> None:
    bounds = {"num_buffers": st.integers(1, 4), "max_receives": st.integers(1, 3), "max_joined_bytes": st.integers(0, 20)}
    pair = Pair(**{name: data.draw(bound) for name, bound in bounds.items()})
    plans = {f"a{i}": toy_plan(*data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))) for i in range(3)}
    unready = [(attempt_id, index) for attempt_id, plan in plans.items() for index in range(len(plan.entries))]
    unready = data.draw(st.permutations(unready))
    cuts = [(attempt_id, data.draw(st.sampled_from(CUTS))) for attempt_id in plans]
    unopened = list(plans)
    cancelled: set[str] = set()
    while True:
        steps = pair.steps()
        if unopened and not pair.is_closed:
            steps.append(lambda: _open(pair, unopened.pop(), plans))
        if unready and not unopened:
            steps.append(lambda: pair.ready(unready[0][0], unready.pop(0)[1]))
            steps.append(lambda: pair.lend(unready[0][0]))
        if pair.lent:
            steps.append(lambda: _fill(pair, min(pair.lent), unready, data.draw(st.integers(0, 3))))
        if cuts and not unopened:
            steps.append(lambda: _cut(pair, *cuts.pop(), cancelled))
        if not steps:
            break
        steps[data.draw(st.integers(0, len(steps) - 1))]()
    assert pair.closed_with is None, f"honest ends must never break the protocol: {pair.closed_with}"
    pair.check_idle()
    for attempt_id, plan in plans.items():
        sent, received = (pair.finished[end].get(attempt_id) for end in ("sender", "receiver"))
        if attempt_id in unopened:
            continue
        if received is None and pair.is_closed and pair.book.sweep(pair.now_s + 11.0).count(attempt_id):
            continue  # its Open was lost with the stream: the reservation's own lease ends it
        assert sent is not None and received is not None, "an attempt never ended at one of its ends"
        if sent.error is None:
            assert received.error is None, "prefill saw an Ack that decode did not give"
        if received.error is None:
            assert received.payload_bytes == plan.num_bytes
        if attempt_id not in cancelled and not pair.is_closed:
            assert sent.error is None and received.error is None
            assert sent.payload_bytes == plan.num_bytes and sent.header_bytes == received.header_bytes


def _open(pair: Pair, attempt_id: str, plans: dict) -> None:
    pair.expect(attempt_id, plans[attempt_id])
    pair.open(attempt_id, plans[attempt_id])


def _fill(pair: Pair, ticket: int, unready: list[tuple[str, int]], num_entries: int) -> None:
    """The step packs so many entries at most, from its attempt's first unready one on."""
    attempt_id = pair.lent[ticket]
    mine = sorted(index for owner, index in unready if owner == attempt_id)[:num_entries]
    follow: list[int] = []
    for at, index in enumerate(mine):
        num_bytes = sum(pair.plans[attempt_id].entries[i].num_bytes for i in (*follow, index))
        if index != mine[0] + at or (follow and num_bytes > pair.max_joined_bytes):
            break  # only neighbours share a message
        follow.append(index)
    pair.fill(ticket, *follow)
    for index in follow:
        unready.remove((attempt_id, index))


def _cut(pair: Pair, attempt_id: str, how: str, cancelled: set[str]) -> None:
    if how == "none":
        return
    cancelled.add(attempt_id)
    if how in ("sender", "both"):
        pair.cancel_at_sender(attempt_id)
        pair.cancel_at_sender(attempt_id)
    if how in ("receiver", "both"):
        pair.cancel_at_receiver(attempt_id)
        pair.cancel_at_receiver(attempt_id)
    if how == "close":
        pair.close()
        pair.close()


def test_a_cancel_at_every_step_leaves_nothing() -> None:
    """Two attempts; after each number of steps one of them is cancelled at either end: the other one completes."""
    plan = toy_plan(3, 4, 5)
    for cut_at in range(60):
        for end in ("sender", "receiver"):
            pair = Pair(num_buffers=2, max_receives=1)
            for attempt_id in ("victim", "other"):
                pair.expect(attempt_id, plan)
                pair.open(attempt_id, plan)
                pair.ready(attempt_id, 0, 1, 2)
            num_steps = 0
            while steps := pair.steps():
                if num_steps == cut_at:
                    pair.cancel_at_sender("victim") if end == "sender" else pair.cancel_at_receiver("victim")
                    steps = pair.steps()
                num_steps += 1
                if steps:
                    steps[num_steps % len(steps)]()
            pair.check_idle()
            assert pair.closed_with is None
            assert pair.finished["sender"]["other"].error is None and pair.finished["receiver"]["other"].error is None
            errors = [pair.finished[e]["victim"].error for e in ("sender", "receiver")]
            assert all(error is None or isinstance(error, Cancelled | Unavailable) for error in errors)


def test_an_issued_message_is_quarantined_until_it_returns() -> None:
    plan = toy_plan(5)
    pair = Pair()
    pair.expect("a", plan)
    pair.open("a", plan)
    pair.ready("a", 0)
    while not pair.issued:
        pair.steps()[0]()
    pair.cancel_at_receiver("a")
    assert pair.quarantined["receiver"] == {0}, "a posted receive's buffer must not be freed by a cancel"
    assert pair.free["receiver"] == pair.num_buffers - 1
    pair._deliver_to_sender()  # Reject
    assert pair.quarantined["sender"] == {0}
    pair._move()
    pair.run()
    pair.check_idle()


def test_closing_keeps_posted_buffers_until_the_channel_gives_them_back() -> None:
    plan = toy_plan(5, 5)
    pair = Pair()
    pair.expect("a", plan)
    pair.open("a", plan)
    pair.ready("a", 0, 1)
    while len(pair.issued) < 2:
        next(step for step in pair.steps() if step != pair._move)()
    pair.close()
    assert isinstance(pair.finished["sender"]["a"].error, Unavailable), "the attempt ends at once"
    assert isinstance(pair.finished["receiver"]["a"].error, Unavailable)
    assert len(pair.quarantined["receiver"]) == 2 and len(pair.quarantined["sender"]) == 2
    pair.run()
    pair.check_idle()
