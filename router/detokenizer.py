"""Token ids to text, one token at a time. Knows how to wait for the rest of a character; knows no request and no stop string."""

from collections.abc import Callable, Sequence
from typing import Final

_REPLACEMENT: Final = "\ufffd"


class Detokenizer:
    """Turns a growing list of ids into text deltas whose concatenation is the whole answer.

    A character whose bytes are split over tokens is held back until it is complete, so no delta ever ends in half of one.
    An answer that ends in the middle of a character ends before it: the joined deltas are `decode(ids)` without trailing
    replacement characters.
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
        whole = text.rstrip(_REPLACEMENT)
        delta = whole[self._num_shown :]
        self._num_shown = max(self._num_shown, len(whole))
        if len(whole) == len(text):
            self._context, self._done = self._done, len(self._ids)
            self._num_shown = len(self._decode(self._ids[self._context :]))
        return delta
