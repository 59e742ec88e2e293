"""Between the leg that produces tokens and the stream that sends them: bounded, and gathered into few messages."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from shoal.errors import ShoalError

Item = TypeVar("Item")


class TokenQueue(Generic[Item]):
    """One producer, one consumer. A full queue stops the producer, so a slow reader costs memory up to `max_items`."""

    def __init__(self, max_items: int, *, clock: Callable[[], float] | None = None) -> None:
        self._max_items = max_items
        self._items: deque[Item] = deque()
        self._changed = asyncio.Event()  # for the consumer
        self._room = asyncio.Event()  # for the producer
        self._ended = False
        self._error: BaseException | None = None
        self._clock = clock or time.monotonic
        self._last_take: float | None = None

    async def put(self, item: Item) -> None:
        """Add an item, waiting for room. After the end nothing is added: behind what was dropped it would leave a gap."""
        while len(self._items) >= self._max_items:
            self._room.clear()
            await self._room.wait()
        if not self._ended:
            self._items.append(item)
            self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        """No more items come. What is queued is still delivered, then the error is raised."""
        if not self._ended:
            self._ended, self._error = True, error
            self._changed.set()

    def end_now(self, error: ShoalError) -> None:
        """The same, but what is queued is dropped."""
        self._items.clear()
        self._ended, self._error = True, error
        self._changed.set()
        self._room.set()

    async def take(self, max_items: int, flush_s: float) -> list[Item]:
        """The next items in order, [] at the end. The first of all come at once, later ones at most `flush_s` after the last.

        Raises the error that the producer ended with, once the items before it are taken.
        """
        while not self._items and not self._ended:
            await self._wait(None)
        if self._last_take is not None:
            deadline = self._last_take + flush_s
            while len(self._items) < max_items and not self._ended and (left := deadline - self._clock()) > 0:
                await self._wait(left)
        self._last_take = self._clock()
        taken = [self._items.popleft() for _ in range(min(max_items, len(self._items)))]
        self._room.set()
        if not taken and self._error is not None:
            raise self._error
        return taken

    async def _wait(self, timeout_s: float | None) -> None:
        self._changed.clear()
        if timeout_s is None:
            await self._changed.wait()
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
