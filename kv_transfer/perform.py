"""Carries actions out strictly in order, also when carrying one out causes more. Knows nothing of what they mean."""

from collections import deque
from collections.abc import Callable, Iterable

from shoal.kv_transfer.actions import Action


class Performer:
    """Call it with a machine's actions; a nested call queues behind. Lives on the event loop."""

    def __init__(self, carry_out: Callable[[Action], None]) -> None:
        self._carry_out = carry_out
        self._queue: deque[Action] = deque()
        self._busy = False

    def __call__(self, actions: Iterable[Action]) -> None:
        self._queue.extend(actions)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue:
                self._carry_out(self._queue.popleft())
        finally:
            self._busy = False
