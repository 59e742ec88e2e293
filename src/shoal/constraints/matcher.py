"""One answer's constraint, at the point the answer has reached. Knows token ids and masks; knows no request.

Where the answer may end, EOS and the request's stop ids may come; elsewhere they may not, unless the constraint leaves nothing
else: then the stop wins, as it does for stop strings and max_tokens. EOS that the request ignores comes only where nothing else
may; the answer is then complete.
"""

from collections.abc import Collection
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

_MAX_WORDS: Final = 400  # characters of llguidance's own message


class AnswerConstraint:
    """Fits `shoal.engine.sampling.TokenConstraint`. Two threads may use it, never at the same time."""

    def __init__(self, matcher: LLMatcher, eos_ids: Collection[int], stop_ids: Collection[int]) -> None:
        """`matcher` is this answer's own. `stop_ids` end the answer; they include EOS unless it is ignored."""
        self._matcher: Any = matcher
        self._stop_ids = frozenset(stop_ids)
        self._ignored_ids = frozenset(eos_ids) - self._stop_ids
        self._pending: list[int] = []  # accepted, and not yet looked at
        self.is_complete = False  # nothing more may come, though no stop id has
        self.failure: str | None = None  # in words: the constraint can be followed no further

    def fill_mask(self, bitmask: NDArray[np.int32], row: int) -> None:
        """Write row `row` of `bitmask` [rows, ⌈vocab / 32⌉]: bit t % 32 of word t // 32 is 1 where token t may come next.

        At least one token is allowed. After a failure all are, and whoever draws must look at `failure`.
        """
        own = bitmask[row]
        self.catch_up()
        if self.failure is None:
            fill_next_token_bitmask(self._matcher, bitmask, row)
            if self._matcher.is_error():
                self.failure = reason(self._matcher)
        if self.failure is not None:
            own.fill(-1)
            return
        if self._matcher.is_accepting():
            _allow(own, self._stop_ids)
            _forbid(own, self._ignored_ids)
        else:
            _forbid(own, self._stop_ids)

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token, drawn or replayed. Called once for each, in order. Costs nothing yet."""
        if token_id not in self._stop_ids:
            self._pending.append(token_id)
            self.is_complete = token_id in self._ignored_ids

    def catch_up(self) -> None:
        """Follow what was accepted. May take long."""
        pending, self._pending = self._pending, []
        if self.failure is None and not self._matcher.consume_tokens(pending):
            self.failure = reason(self._matcher)


def reason(matcher: LLMatcher) -> str:
    """Why a matcher is in error, in its own words; without its state, which would tell of the answer."""
    words = str(matcher.get_error()).partition("<state>")[0].partition("<backtrace>")[0].replace("<non-verbose/>", "")
    return " ".join(words.split())[:_MAX_WORDS] or str(matcher.stop_reason())


def _allow(words: NDArray[np.int32], ids: Collection[int]) -> None:
    bits = words.view(np.uint32)
    for token_id in ids:
        if token_id // 32 < len(bits):
            bits[token_id // 32] |= np.uint32(1 << (token_id % 32))


def _forbid(words: NDArray[np.int32], ids: Collection[int]) -> None:
    """Unless nothing would be left."""
    before = words.copy()
    bits = words.view(np.uint32)
    for token_id in ids:
        if token_id // 32 < len(bits):
            bits[token_id // 32] &= ~np.uint32(1 << (token_id % 32))
    if not words.any():
        words[:] = before
