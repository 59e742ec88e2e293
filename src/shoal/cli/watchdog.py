"""Notices a child that lives but does nothing: it should say a word each second. Knows time; knows no process."""

import asyncio
from typing import Final

_LOOKS: Final = 4  # within the patience


class Watchdog:
    """Feed it with `heard`. Time in which this process itself stood still counts as one look, so it blames nobody for that."""

    def __init__(self, patience_s: float) -> None:
        self._interval_s = patience_s / _LOOKS
        self._word = asyncio.Event()
        self._num_silent: int | None = None  # looks since the last word; None before the first

    def heard(self) -> None:
        self._num_silent = 0
        self._word.set()

    async def word(self) -> None:
        """Return once something is heard again."""
        self._word.clear()
        await self._word.wait()

    async def silence(self) -> None:
        """Return once nothing was heard for the whole patience. Before the first word it waits: a start may take long."""
        while self._num_silent is None or self._num_silent <= _LOOKS:
            await asyncio.sleep(self._interval_s)
            if self._num_silent is not None:
                self._num_silent += 1
