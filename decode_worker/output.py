"""What a request says to its caller: tokens as they are sampled, then how it ended. Knows no transport.

The step loop never waits for a reader. What a slow reader has not fetched is kept and handed over in one piece at its next
read; it is bounded by the request's own max_tokens, so one request can neither stall others nor grow without bound.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from shoal.errors import ShoalError
from shoal.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One sampled token."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Finish:
    """How generation ended, when it did not fail."""

    reason: FinishReason
    matched_token_id: int | None = None


class OutputStream:
    """Written by the event loop that runs the request, read once by its caller."""

    def __init__(self) -> None:
        self._tokens: list[OutputToken] = []
        self._end: Finish | ShoalError | None = None
        self._news = asyncio.Event()

    def put(self, token: OutputToken) -> None:
        """Add a token."""
        self._tokens.append(token)
        self._news.set()

    def end(self, end: Finish | ShoalError) -> None:
        """Say how the request ended. Only the first end counts."""
        self._end = self._end or end
        self._news.set()

    @property
    def finish(self) -> Finish | None:
        """How generation ended, once it has."""
        return self._end if isinstance(self._end, Finish) else None

    async def batches(self) -> AsyncIterator[list[OutputToken]]:
        """Tokens in order, as many at a time as have gathered. Ends with the request; raises the error it failed with."""
        while True:
            await self._news.wait()
            self._news.clear()
            tokens, self._tokens = self._tokens, []
            if tokens:
                yield tokens
            if self._end is not None and not self._tokens:
                break
        if isinstance(self._end, ShoalError):
            raise self._end
