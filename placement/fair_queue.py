"""Who is let in next when not all fit. Knows classes, tenants, costs and the order of arrival; knows no clock and no blocks.

A request stands in the line of its class and tenant, first come, first served. Three rules choose between lines:

1. Classes share by weight (high 16, normal 4, low 1). Each has a virtual time, which moves by cost / weight with each of its
   requests that is let in; the one whose next request would move it to the least goes next. So a high request passes those of
   other classes that came shortly before, and while all classes wait, low still gets one twenty-first of what is let in: it ages
   by what others get, and starves never.
2. Tenants of a class share alike, by cost: a tenant with a thousand requests in line delays another's first by one of them.
3. A request that does not fit keeps its turn, and those behind it that fit may pass it, `MAX_PASSED` times in all. Then nobody
   passes: what comes free is kept for it. So a long prompt waits for room, never for the end of a stream of short ones; and
   short ones do not stand idle behind it meanwhile.

Source of the first two: self-clocked fair queueing, with requests for packets.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from shoal.types import Priority, Turn

Item = TypeVar("Item", bound=Hashable)

MAX_PASSED: Final = 16
_LOOK_AHEAD: Final = 32  # how far behind the first a request that fits is looked for


@dataclass(slots=True, eq=False)
class _Waiter(Generic[Item]):
    item: Item
    turn: Turn
    cost: int
    number: int  # of arrival
    num_passed: int = 0


@dataclass(slots=True, eq=False)
class _Line(Generic[Item]):
    """One tenant's requests of one class."""

    virtual: float = 0.0
    waiters: deque[_Waiter[Item]] = field(default_factory=deque)

    @property
    def next_virtual(self) -> float:
        return self.virtual + self.waiters[0].cost


@dataclass(slots=True, eq=False)
class _Class(Generic[Item]):
    """One class's lines. `clock` is the virtual time that its last served line came to."""

    priority: Priority
    virtual: float = 0.0
    clock: float = 0.0
    lines: dict[str, _Line[Item]] = field(default_factory=dict)

    @property
    def waiting_lines(self) -> list[_Line[Item]]:
        """Those with somebody in them, the next to be served first."""
        lines = [line for line in self.lines.values() if line.waiters]
        return sorted(lines, key=lambda line: (line.next_virtual, line.waiters[0].number))


class FairQueue(Generic[Item]):
    """`push` and `discard` by whoever waits, `pop` by whoever has room."""

    def __init__(self) -> None:
        self._classes: dict[Priority, _Class[Item]] = {priority: _Class(priority) for priority in Priority}
        self._waiters: dict[Item, _Waiter[Item]] = {}
        self._clock = 0.0  # the virtual time that the last served class came to
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def waiting(self) -> dict[Priority, tuple[int, int]]:
        """Requests that wait and what they cost together, by class."""
        found = dict.fromkeys(Priority, (0, 0))
        for waiter in self._waiters.values():
            num_requests, cost = found[waiter.turn.priority]
            found[waiter.turn.priority] = (num_requests + 1, cost + waiter.cost)
        return found

    def push(self, item: Item, turn: Turn, cost: int, *, resumes: bool = False) -> None:
        """Stand at the end of one's line, or at its head to go on with what had begun. Costs, in any one unit, are at least 1."""
        own = self._classes[turn.priority]
        if not own.waiting_lines:
            own.virtual = max(own.virtual, self._clock)
        line = own.lines.setdefault(turn.tenant, _Line())
        if not line.waiters:
            line.virtual = max(line.virtual, own.clock)
        waiter = _Waiter(item, turn, max(1, cost), self._num_pushed)
        self._num_pushed += 1
        self._waiters[item] = waiter
        (line.waiters.appendleft if resumes else line.waiters.append)(waiter)

    def discard(self, item: Item) -> None:
        """Leave without a turn. Harmless when it is not here."""
        if (waiter := self._waiters.pop(item, None)) is not None:
            self._classes[waiter.turn.priority].lines[waiter.turn.tenant].waiters.remove(waiter)

    def pop(self, fits: Callable[[Item], bool]) -> Item | None:
        """The next that fits, taken out and charged to its line; None when nobody may be let in now."""
        passed: list[_Waiter[Item]] = []
        for waiter in self._in_order():
            if fits(waiter.item):
                for other in passed:
                    other.num_passed += 1
                self._let_in(waiter)
                return waiter.item
            passed.append(waiter)
            if waiter.num_passed >= MAX_PASSED or len(passed) >= _LOOK_AHEAD:
                return None
        return None

    def _let_in(self, waiter: _Waiter[Item]) -> None:
        own = self._classes[waiter.turn.priority]
        line = own.lines[waiter.turn.tenant]
        own.virtual += waiter.cost / own.priority.weight
        line.virtual += waiter.cost
        self._clock, own.clock = max(self._clock, own.virtual), max(own.clock, line.virtual)
        line.waiters.remove(waiter)
        del self._waiters[waiter.item]

    def _in_order(self) -> Iterator[_Waiter[Item]]:
        """All that wait, by rules 1 and 2 as they stand now."""
        found = [(own, lines) for own in self._classes.values() if (lines := own.waiting_lines)]
        for _, lines in sorted(found, key=lambda entry: (_next_virtual(*entry), -entry[0].priority.rank)):
            for line in lines:
                yield from tuple(line.waiters)


def _next_virtual(own: _Class[Item], lines: list[_Line[Item]]) -> float:
    return own.virtual + lines[0].waiters[0].cost / own.priority.weight
