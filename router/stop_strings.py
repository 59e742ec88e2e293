"""Finds stop strings in a growing text. Knows nothing of tokens; sees generated text only, so a prompt's tail never matches."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text through, holding back what may yet turn out to be the start of a stop string.

    The match is the one that a reader going character by character would meet first (of two that end together, the longer),
    so it does not depend on how the text was cut. Nothing of the matched string is ever passed on, or all of it with
    `shows_stop`; in either case nothing after it.
    """

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._shows_stop = shows_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, *, may_match: bool = True) -> str:
        """The text that is safe to show after `delta`; "" for ever after a match.

        A stop string that ends in a delta that may not match is text like any other; one that only begins there may match.
        """
        if self.matched is not None:
            return ""
        text = self._held + delta
        if may_match and (found := self._found(text, len(self._held))):
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._shows_stop else start]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _found(self, text: str, num_seen: int) -> list[tuple[int, int, str]]:
        """End, start and name of each stop string's first occurrence that ends after the characters seen before."""
        starts = ((text.find(stop, max(0, num_seen - len(stop) + 1)), stop) for stop in self._stops)
        return [(start + len(stop), start, stop) for start, stop in starts if start >= 0]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
