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

    def push(self, delta: str) -> str:
        """The text that is safe to show after `delta`; "" for ever after a match."""
        if self.matched is not None:
            return ""
        text = self._held + delta
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return text[: end if self._shows_stop else start]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
