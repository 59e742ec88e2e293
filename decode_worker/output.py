"""What a request says to its caller: tokens as they are sampled, then how it ended. Knows no transport.

The step loop never waits for a reader. What a slow reader has not fetched is kept and handed over in one piece at its next
read; it is bounded by the request's own max_tokens, so one request can neither stall others nor grow without bound.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

from shoal.errors import ShoalError
from shoal.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One sampled token, or one scored."""

    token_id: int
    logprobs: TokenLogprobs | None
    index: int = 0  # of the child


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's tokens after the first. Comes once, before any token."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """How a child's generation ended, when it did not fail. The request's own end is that of its last child."""

    reason: FinishReason
    matched_token_id: int | None = None
    index: int = 0


Output: TypeAlias = OutputToken | PromptLogprobs | Finish


class OutputStream:
    """Written by the event loop that runs the request, read once by its caller."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._end: Finish | ShoalError | None = None
        self._news = asyncio.Event()

    def put(self, output: Output) -> None:
        """Add a token, or the end of a child that is not the last one."""
        self._outputs.append(output)
        self._news.set()

    def end(self, end: Finish | ShoalError) -> None:
        """Say how the request ended. Only the first end counts."""
        self._end = self._end or end
        self._news.set()

    @property
    def finish(self) -> Finish | None:
        """How the last child's generation ended, once it has."""
        return self._end if isinstance(self._end, Finish) else None

    async def batches(self) -> AsyncIterator[list[Output]]:
        """What there is in order, as much at a time as has gathered. Ends with the request; raises the error it failed with."""
        while True:
            await self._news.wait()
            self._news.clear()
            outputs, self._outputs = self._outputs, []
            if outputs:
                yield outputs
            if self._end is not None and not self._outputs:
                break
        if isinstance(self._end, ShoalError):
            raise self._end
