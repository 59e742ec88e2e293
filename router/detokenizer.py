"""Token ids to text, one token at a time. Knows how to wait for the rest of a character; knows no request and no stop string."""

from collections.abc import Callable, Sequence
from typing import Final

_REPLACEMENT: Final = "\ufffd"
_MAX_HELD: Final = 3  # of a character's four bytes, at most three can be waiting for the next
_LONGEST_CONTEXT: Final = 64  # ids that have been looked at without an end of a character


class Detokenizer:
    """Turns a growing list of ids into text deltas whose concatenation is the whole answer.

    A character whose bytes are split over tokens is held back until it is complete, so no delta ever ends in half of one.
    An answer that ends in the middle of a character ends before it: the joined deltas are `decode(ids)` without the last
    replacement characters, three at most. A token costs the same however long the answer is, also where it is not text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # decoding starts here, so that a decoder that looks at its neighbour sees one
        self._done = 0  # ids before this one are wholly text
        self._num_shown = 0  # characters of decode(ids[context:]) that were handed out

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is still open."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._context :])
        num_held = min(_MAX_HELD, len(text) - len(text.rstrip(_REPLACEMENT)))
        num_whole = len(text) - num_held
        delta = text[self._num_shown : num_whole]
        self._num_shown = max(self._num_shown, num_whole)
        if num_held == 0:
            if self._done > self._context:
                self._start_from(self._done, 0)
            else:
                self._num_shown = len(text)
            self._done = len(self._ids)
        elif len(self._ids) - self._context > _LONGEST_CONTEXT:
            self._done = len(self._ids) - _LONGEST_CONTEXT // 2  # this is no text: what was shown of it stays
            self._start_from(self._done, num_held)
        return delta

    def _start_from(self, context: int, num_held: int) -> None:
        self._context = context
        self._num_shown = len(self._decode(self._ids[context:])) - num_held
