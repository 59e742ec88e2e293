"""When a transfer's entries leave, and what lies in the buffer that a step fills."""

import threading
from collections.abc import Sequence

import pytest
import torch

from shoal.errors import ShoalError
from shoal.kv_transfer.checksum import checksum
from shoal.kv_transfer.gathering import Gathering
from shoal.kv_transfer.guard import Guard
from shoal.placement.plan import Entry
from tests.fakes.transfer import toy_plan

SIZE = 100  # of each entry


class Told:
    """What a gathering reports, in order."""

    def __init__(self, num_entries: int, max_gathered_bytes: int, *, in_place: bool = False, size: int = SIZE) -> None:
        self.plan = toy_plan(*[size] * num_entries)
        self.guard = Guard()
        self.filled: list[tuple[int, list[int], Sequence[int] | None, ShoalError | None]] = []
        self.ready: list[list[int]] = []
        self.gathering = Gathering(
            self.plan, self.guard, self.copy, max_gathered_bytes, in_place=in_place,
            filled=lambda ticket, entries, crcs, error: self.filled.append((ticket, [e.index for e in entries], crcs, error)),
            ready=lambda indices: self.ready.append(list(indices)),
        )  # fmt: skip

    def copy(self, entry: Entry, out: torch.Tensor) -> None:
        out.fill_(entry.index + 1)


def buffer(num_entries: int) -> torch.Tensor:
    return torch.zeros(num_entries * SIZE, dtype=torch.uint8)


def test_messages_shrink_towards_the_end_and_the_last_layer_goes_alone() -> None:
    told = Told(30, 8 * SIZE)
    told.gathering.begin_step()
    for index in range(30):
        told.gathering.complete([index])
    told.gathering.end_step()
    assert [index for indices in told.ready for index in indices] == list(range(30))
    assert [len(indices) for indices in told.ready] == [8, 8, 8, 4, 1, 1]


def test_what_is_due_before_the_last_entry_does_not_wait_for_it() -> None:
    for num_entries in range(2, 40):
        told = Told(num_entries, 1 << 30)
        told.gathering.begin_step()
        for index in range(num_entries - 1):
            told.gathering.complete([index])
        assert [index for indices in told.ready for index in indices] == list(range(num_entries - 1))


def test_what_is_read_in_place_is_announced_in_few_messages_over_all_steps() -> None:
    told = Told(120, 8 << 20, in_place=True, size=400_000)
    for step in range(4):
        told.gathering.begin_step()
        for index in range(30 * step, 30 * step + 30):
            told.gathering.complete([index])
        told.gathering.end_step()
    assert [index for indices in told.ready for index in indices] == list(range(120))
    assert [len(indices) for indices in told.ready] == [96, 20, 4]  # what is left is read in the time of one more message
    assert not told.filled


def test_what_completes_layer_by_layer_is_announced_in_the_order_of_the_plan() -> None:
    """A prompt of which much is cached here completes several chunks of a layer at once; what shares a message is neighbours."""
    told = Told(30, 8 << 20, in_place=True)
    for layer in range(10):
        told.gathering.complete([layer, 10 + layer, 20 + layer])
    assert told.ready == [list(range(30))]


def test_whoever_asks_before_tells_no_more_than_what_is_due() -> None:
    told, unheard = Told(120, 8 << 20, in_place=True, size=400_000), list[int]()
    for index in range(120):
        unheard.append(index)
        if told.gathering.is_worth(400_000 * len(unheard)):
            told.gathering.complete(unheard)
            unheard.clear()
    assert [len(indices) for indices in told.ready] == [96, 20, 4] and not unheard


@pytest.mark.parametrize("num_entries", [1, 2, 3, 10, 30, 41])
def test_asking_before_changes_no_message_of_a_step_that_packs(num_entries: int) -> None:
    """Told of every layer, or only of those that it has asked about: the same messages, the same bytes in them."""
    sent: list[list[tuple[list[int], list[int]]]] = []
    for asks in (False, True):
        told, unheard, memory = Told(num_entries, 8 * SIZE), list[int](), dict[int, torch.Tensor]()
        told.gathering.begin_step()
        for index in range(num_entries):
            if told.gathering.takes_buffer:
                memory[index] = buffer(8)
                assert told.gathering.offer(index, memory[index])
            unheard.append(index)
            if not asks or told.gathering.is_worth(SIZE * len(unheard)):
                told.gathering.complete(unheard)
                unheard.clear()
        told.gathering.complete(unheard)
        told.gathering.end_step()
        assert not told.ready
        sent.append(
            [(entries, memory[ticket][: SIZE * len(entries)].tolist()) for ticket, entries, _, _ in told.filled if entries]
        )
    assert sent[0] == sent[1]
    assert [index for entries, _ in sent[1] for index in entries] == list(range(num_entries))


def test_a_small_plan_read_in_place_is_one_message() -> None:
    told = Told(30, 8 << 20, in_place=True)
    for index in range(29):
        told.gathering.complete([index])
    assert not told.ready
    told.gathering.complete([29])
    assert told.ready == [list(range(30))]


def test_a_step_fills_the_buffer_and_what_does_not_fit_waits_for_the_next() -> None:
    told = Told(10, 3 * SIZE)
    told.gathering.begin_step()
    memory = buffer(2)
    assert told.gathering.offer(7, memory) and not told.gathering.takes_buffer
    for index in range(3):
        told.gathering.complete([index])
    ((ticket, entries, crcs, error),) = told.filled
    assert (ticket, entries, error) == (7, [0, 1], None) and not told.ready
    assert memory.tolist() == [1] * SIZE + [2] * SIZE
    assert crcs == [checksum(memory[:SIZE]), checksum(memory[SIZE:])]
    more = buffer(4)
    assert told.gathering.offer(8, more)
    told.gathering.complete([3])
    told.gathering.complete([4])
    assert told.filled[1][:2] == (8, [2, 3, 4]) and more[: 3 * SIZE].tolist() == [3] * SIZE + [4] * SIZE + [5] * SIZE
    told.gathering.complete([5])
    told.gathering.end_step()
    assert told.ready == [[5]], "without a buffer the lane packs"


def test_entries_that_do_not_follow_one_another_do_not_share_a_buffer() -> None:
    told = Told(8, 1 << 30)
    told.gathering.begin_step()
    told.gathering.offer(1, buffer(8))
    told.gathering.complete([0, 1])
    told.gathering.complete([4])
    told.gathering.end_step()
    assert [entries for _, entries, _, _ in told.filled] == [[0, 1]] and told.ready == [[4]]


def test_no_buffer_stays_behind_a_step() -> None:
    told = Told(4, 1 << 30)
    assert not told.gathering.offer(1, buffer(1)), "no step is running"
    told.gathering.begin_step()
    assert told.gathering.offer(2, buffer(1))
    told.gathering.end_step()
    assert told.filled == [(2, [], None, None)] and not told.gathering.offer(3, buffer(1))


def test_an_ended_transfer_gives_its_buffer_back_once_and_copies_no_more() -> None:
    told = Told(4, 1 << 30)
    told.gathering.begin_step()
    told.gathering.offer(2, buffer(4))
    told.gathering.complete([0])
    told.guard.close()
    told.gathering.withdraw()
    told.gathering.withdraw()
    told.gathering.complete([1])
    told.gathering.end_step()
    assert [(ticket, crcs) for ticket, _, crcs, _ in told.filled] == [(2, None)]


def test_a_guard_closed_under_a_running_step_gives_the_buffer_back() -> None:
    told = Told(4, 1 << 30)
    told.gathering.begin_step()
    told.gathering.offer(2, buffer(4))
    told.guard.close()
    told.gathering.complete([0])
    assert told.filled == [(2, [], None, None)]


def test_a_copy_that_fails_is_told_with_the_buffer() -> None:
    told = Told(2, 1 << 30)
    told.copy = lambda entry, out: 1 / 0  # type: ignore[assignment,method-assign]
    gathering = Gathering(
        told.plan, told.guard, told.copy, 1 << 30,
        filled=lambda ticket, entries, crcs, error: told.filled.append((ticket, [], crcs, error)),
        ready=lambda indices: told.ready.append(list(indices)),
    )  # fmt: skip
    gathering.begin_step()
    gathering.offer(5, buffer(2))
    gathering.complete([0])
    ((ticket, _, crcs, error),) = told.filled
    assert ticket == 5 and crcs is None and error is not None and "ZeroDivisionError" in str(error)


@pytest.mark.parametrize("rounds", [200])
def test_steps_lending_and_ending_at_once(rounds: int) -> None:
    """One thread completes, another lends and ends: every ticket comes back exactly once, no entry is told twice."""
    for number in range(rounds):
        told = Told(24, 4 * SIZE)
        lent: list[int] = []
        told.gathering.begin_step()

        def step(told: Told = told) -> None:
            for index in range(24):
                told.gathering.complete([index])
            told.gathering.end_step()

        thread = threading.Thread(target=step)
        thread.start()
        for ticket in range(12):
            if told.gathering.takes_buffer and told.gathering.offer(ticket, buffer(6)):
                lent.append(ticket)
        if number % 2:
            told.guard.close()
            told.gathering.withdraw()
        thread.join()
        assert sorted(ticket for ticket, *_ in told.filled) == lent
        indices = [index for _, entries, _, _ in told.filled for index in entries] + [i for ready in told.ready for i in ready]
        assert len(indices) == len(set(indices)) and (number % 2 or sorted(indices) == list(range(24)))
