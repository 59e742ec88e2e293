"""Single rules of the two machines: what is refused, ignored, remembered and expired."""

import pytest

from shoal.errors import AlreadyExists, Cancelled, InternalError, Mismatch, Unavailable
from shoal.kv_transfer import actions as act
from shoal.kv_transfer.attempts import AttemptBook
from shoal.kv_transfer.receiver import ChecksumMismatch, ReceiverMachine
from shoal.kv_transfer.sender import SenderMachine
from shoal.pb.internal.v1 import transfer_pb2 as pb
from tests.fakes.transfer import Pair, toy_handle, toy_plan

PLAN = toy_plan(4, 6)


def receiver_with(*attempt_ids: str) -> tuple[ReceiverMachine, AttemptBook]:
    book = AttemptBook(lease_s=10.0, remember_s=100.0)
    for attempt_id in attempt_ids:
        book.expect(toy_handle(attempt_id, PLAN), PLAN, 0.0)
    return ReceiverMachine(book, max_receives=2), book


def open_message(attempt_id: str, **changes: object) -> pb.SenderMessage:
    return pb.SenderMessage(open=pb.Open(attempt_id=attempt_id, handle=toy_handle(attempt_id, PLAN, **changes).encode()))


def ready_message(n: int, attempt_id: str, entry: int, num_bytes: int) -> pb.SenderMessage:
    return pb.SenderMessage(ready=pb.Ready(n=n, attempt_id=attempt_id, entry=entry, num_bytes=num_bytes))


def only_error(actions: list[act.Action]) -> Exception:
    assert len(actions) == 1 and isinstance(actions[0], act.ClosePair), actions
    return actions[0].error


def reject_of(actions: list[act.Action]) -> pb.Reject:
    assert isinstance(actions[0], act.Write) and isinstance(actions[1], act.Rejected)
    return actions[0].message.reject


def test_no_ready_before_accept() -> None:
    pair = Pair()
    pair.expect("a", PLAN)
    pair.open("a", PLAN)
    pair.ready("a", 0, 1)
    assert not pair.steps()[1:] and len(pair.to_receiver) == 1, "only Open may be on its way"
    pair._deliver_to_receiver()
    assert not pair.packing and not pair.wanting["sender"]
    pair._deliver_to_sender()
    assert pair.wanting["sender"]
    machine, _ = receiver_with("a")
    error = only_error(machine.on_message(ready_message(0, "a", 0, 4)))
    assert isinstance(error, InternalError) and "before its Accept" in str(error)


def test_bytes_that_differ_from_the_plan_close_the_pair_before_anything_is_posted() -> None:
    machine, _ = receiver_with("a")
    machine.on_message(open_message("a"))
    error = only_error(machine.on_message(ready_message(0, "a", 0, 5)))
    assert isinstance(error, Mismatch) and "5 bytes at prefill, 4 in decode's plan" in str(error)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (ready_message(1, "a", 0, 4), "numbered a message 1 where 0 is due"),
        (ready_message(0, "a", 2, 4), "not in its plan"),
        (pb.SenderMessage(hello=pb.Hello()), "does not belong"),
        (pb.SenderMessage(), "does not belong"),
        (pb.SenderMessage(end=pb.End(attempt_id="a", last_n=0)), "never announced"),
    ],
)
def test_broken_order_closes_the_pair(message: pb.SenderMessage, words: str) -> None:
    machine, _ = receiver_with("a")
    machine.on_message(open_message("a"))
    assert words in str(only_error(machine.on_message(message)))


def test_entries_that_follow_one_another_and_are_ready_together_share_a_message() -> None:
    plan = toy_plan(4, 4, 4, 4, 4, 9)
    pair = Pair(max_joined_bytes=9)
    pair.expect("a", plan)
    pair.open("a", plan)
    pair.ready("a", 0, 1, 2, 4, 3, 5)
    sizes = []
    while steps := pair.steps():
        if pair.packing:
            sizes.append([entry.index for entry in pair.packing[0].entries])
        steps[0]()
    assert [indexes for at, indexes in enumerate(sizes) if indexes not in sizes[:at]] == [[0, 1], [2], [4], [3], [5]]
    sent, received = (pair.finished[end]["a"] for end in ("sender", "receiver"))
    assert sent.error is received.error is None and received.payload_bytes == plan.num_bytes
    pair.check_idle()


def test_buffers_lent_to_steps_leave_a_place_to_what_is_ready() -> None:
    machine = SenderMachine(window=3, lease_s=10.0)
    for attempt_id in ("a", "b", "c"):
        machine.open(attempt_id, b"", PLAN, 0.0)
        machine.on_message(pb.ReceiverMessage(accept=pb.Accept(attempt_id=attempt_id)), 0.0)
    assert machine.lend("a") is not None and machine.lend("b") is not None
    assert machine.lend("c") is None
    assert machine.entries_ready("c", [0], 0.0) == [act.WantBuffer()]
    assert isinstance(machine.granted()[0], act.Pack)
    for ticket in (0, 1):
        machine.filled(ticket, (), None, 0.0)
    assert machine.entries_ready("c", [1], 0.0) == [act.WantBuffer()]
    assert machine.lend("a") is None, "what is ready has waited longer"
    assert isinstance(machine.granted()[0], act.Pack)
    assert machine.lend("a") is None, "two of three are taken"


@pytest.mark.parametrize(
    ("num_bytes", "num_more", "max_joined_bytes", "words"),
    [
        (10, 1, 9, "joins entries to 10 bytes, more than 9"),
        (10, 2, 99, "one of the entries 0 to 2 of attempt a is not in its plan"),
        (9, 1, 99, "has 9 bytes at prefill, 10 in decode's plan"),
        (4, 2**32 - 1, 99, "is not in its plan"),
    ],
)
def test_a_joined_message_that_does_not_fit_is_refused(num_bytes: int, num_more: int, max_joined_bytes: int, words: str) -> None:
    _, book = receiver_with("a")
    machine = ReceiverMachine(book, max_receives=2, max_joined_bytes=max_joined_bytes)
    machine.on_message(open_message("a"))
    ready = pb.Ready(n=0, attempt_id="a", entry=0, num_bytes=num_bytes, num_more=num_more)
    assert words in str(only_error(machine.on_message(pb.SenderMessage(ready=ready))))


def test_an_entry_travels_once() -> None:
    machine, _ = receiver_with("a")
    machine.on_message(open_message("a"))
    assert machine.on_message(ready_message(0, "a", 0, 4)) == [act.WantBuffer()]
    assert "came twice" in str(only_error(machine.on_message(ready_message(1, "a", 0, 4))))


def test_opens_are_refused_with_words() -> None:
    machine, book = receiver_with("a", "gone")
    reject = reject_of(machine.on_message(open_message("nobody")))
    assert (reject.code, "no reservation" in reject.reason) == ("Unavailable", True)
    book.end("gone", 1.0)
    reject = reject_of(machine.on_message(open_message("gone")))
    assert (reject.code, "has ended" in reject.reason) == ("Cancelled", True)
    reject = reject_of(machine.on_message(open_message("a", visibility="speed:2:boundary=1", num_prompt_tokens=10)))
    assert reject.code == "Mismatch"
    assert "visibility: speed:2:boundary=1 != full:boundary=1" in reject.reason and "num_prompt_tokens: 10 != 9" in reject.reason
    broken = pb.SenderMessage(open=pb.Open(attempt_id="a", handle=b"\x80\x04junk"))
    assert reject_of(machine.on_message(broken)).code == "InvalidRequest"
    stolen = pb.SenderMessage(open=pb.Open(attempt_id="a", handle=toy_handle("b", PLAN).encode()))
    assert "attempt_id: a != b" in reject_of(machine.on_message(stolen)).reason
    assert isinstance(machine.on_message(open_message("a"))[0], act.Accepted), "refused opens leave the reservation as it was"
    assert reject_of(machine.on_message(open_message("a"))).code == "AlreadyExists"


@pytest.mark.parametrize("attempt_id", ["", "a" * 257])
def test_an_improper_attempt_id_closes_the_pair(attempt_id: str) -> None:
    machine, _ = receiver_with("a")
    assert "characters" in str(only_error(machine.on_message(open_message(attempt_id))))


def test_messages_of_ended_and_unknown_attempts_are_skipped_in_order() -> None:
    machine, book = receiver_with("a", "ended")
    machine.on_message(open_message("a"))
    book.end("ended", 1.0)
    assert machine.on_message(ready_message(0, "a", 0, 4)) == [act.WantBuffer()]
    assert machine.on_message(ready_message(1, "ended", 0, 4)) == [], "1 may not be answered before 0"
    assert machine.on_message(ready_message(2, "never-heard-of", 0, 4)) == []
    assert isinstance(machine.granted()[0], act.Post)
    answers = [action.message for action in machine.posted(0) if isinstance(action, act.Write)]
    assert [(a.WhichOneof("message"), a.go.n or a.skip.n) for a in answers] == [("go", 0), ("skip", 1), ("skip", 2)]


def test_a_wrong_checksum_is_never_accepted() -> None:
    machine, _ = receiver_with("a")
    machine.on_message(open_message("a"))
    for n, entry in enumerate(PLAN.entries):
        machine.on_message(ready_message(n, "a", entry.index, entry.num_bytes))
        machine.granted()
        machine.posted(n)
        machine.arrived(n, entry.num_bytes)
        machine.unpacked(n, [7])
    right = act.combine_checksums([7, 7])
    actions = machine.on_message(pb.SenderMessage(trailer=pb.Trailer(attempt_id="a", checksum=right ^ 1)))
    write, finish = actions
    assert isinstance(write, act.Write) and write.message.reject.reason.startswith("checksum")
    assert isinstance(finish, act.Finish) and isinstance(finish.error, ChecksumMismatch) and isinstance(finish.error, Unavailable)


def test_the_trailer_may_come_before_the_last_bytes() -> None:
    plan = toy_plan(4)
    pair = Pair()
    pair.expect("a", plan)
    pair.open("a", plan)
    pair.ready("a", 0)
    while "a" not in pair.finished["sender"]:
        if pair.to_receiver:
            pair._deliver_to_receiver()
        else:
            pair.steps()[0]()
    assert pair.finished["receiver"]["a"].error is None


def test_strangers_are_ignored_by_the_sender() -> None:
    pair = Pair()
    machine = pair.sender
    for message in (
        pb.ReceiverMessage(accept=pb.Accept(attempt_id="x")),
        pb.ReceiverMessage(ack=pb.Ack(attempt_id="x")),
        pb.ReceiverMessage(reject=pb.Reject(attempt_id="x", code="Unavailable")),
    ):
        assert machine.on_message(message, 0.0) == []
    assert machine.cancel("x", Cancelled("")) == [] and machine.entries_ready("x", [0], 0.0) == []
    for message in (pb.ReceiverMessage(go=pb.Go(n=3)), pb.ReceiverMessage(skip=pb.Skip(n=3)), pb.ReceiverMessage()):
        assert isinstance(only_error(machine.on_message(message, 0.0)), InternalError)


def test_an_early_ack_closes_the_pair() -> None:
    pair = Pair()
    pair.open("a", PLAN)
    assert "not been sent whole" in str(only_error(pair.sender.on_message(pb.ReceiverMessage(ack=pb.Ack(attempt_id="a")), 0.0)))


@pytest.mark.parametrize("indices", [(0, 0), (2,), (-1,)])
def test_entries_outside_the_plan_end_the_attempt(indices: tuple[int, ...]) -> None:
    pair = Pair()
    pair.expect("a", PLAN)
    pair.open("a", PLAN)
    pair.ready("a", *indices)
    assert isinstance(pair.finished["sender"]["a"].error, InternalError)
    pair.run()
    pair.check_idle()
    assert isinstance(pair.finished["receiver"]["a"].error, Unavailable)


def test_leases_of_the_sender_run_out_only_while_it_waits() -> None:
    pair = Pair(lease_s=10.0)
    pair.open("lost", PLAN)
    pair.to_receiver.clear()
    pair.expect("slow", PLAN)
    pair.open("slow", PLAN)
    pair.run()
    pair.now_s = 11.0
    pair.sweep()
    error = pair.finished["sender"]["lost"].error
    assert isinstance(error, Unavailable) and "no Accept" in str(error)
    assert "slow" not in pair.finished["sender"], "an accepted attempt that still computes has no lease"
    pair.ready("slow", 0, 1)
    while not (pair.sender._attempts["slow"].trailer_sent and not pair.to_receiver):
        pair.steps()[0]()
    pair.to_sender.clear()  # whatever decode answers is lost
    pair.now_s = 22.0
    pair.sweep()
    assert isinstance(pair.finished["sender"]["slow"].error, Unavailable)


def test_the_book_remembers_and_forgets() -> None:
    book = AttemptBook(lease_s=10.0, remember_s=100.0)
    handle = toy_handle("a", PLAN)
    book.expect(handle, PLAN, 0.0)
    with pytest.raises(AlreadyExists):
        book.expect(handle, PLAN, 0.0)
    assert book.sweep(9.0) == [] and book.sweep(10.0) == ["a"]
    book.claim(handle)
    assert book.sweep(1000.0) == [], "an opened attempt has no lease of its own"
    assert book.end("a", 20.0) and not book.end("a", 20.0)
    with pytest.raises(AlreadyExists):
        book.expect(handle, PLAN, 21.0)
    with pytest.raises(Cancelled):
        book.claim(handle)
    book.sweep(120.0)
    assert not book.has_ended("a")
    with pytest.raises(Mismatch, match="plan_digest"):
        book.expect(toy_handle("b", PLAN, plan_digest="other"), PLAN, 0.0)
