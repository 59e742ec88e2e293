"""One answer as it grows: ids, text, log-probabilities, its end. Knows tokens and strings; no transport and no time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.router.detokenizer import Detokenizer
from shoal.router.stop_strings import StopMatcher
from shoal.types import FinishReason


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One sampled token as decode sent it."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first


@dataclass(slots=True)
class Delta:
    """What is new since the last delta."""

    tokens: list[OutputToken] = field(default_factory=list)
    text: str = ""

    def __bool__(self) -> bool:
        return bool(self.tokens or self.text)


class Answer:
    """Collects tokens. The joined texts of all deltas are `text`; `tokens` are all that were generated, a stop token included.

    A stop token (EOS or one the client named) leaves no text; a stop string and what follows it neither.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], stop_token_ids: Iterable[int]) -> None:
        self.tokens: list[OutputToken] = []
        self.finish_reason: FinishReason | None = None
        self.matched_token_id: int | None = None
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.matched

    def push(self, tokens: Iterable[OutputToken]) -> Delta:
        """Take sampled tokens. A stop string that they complete ends the answer; tokens after it are dropped."""
        delta = Delta()
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.tokens.append(token)
            delta.tokens.append(token)
            if token.token_id in self._stop_token_ids:
                continue  # decode ends here too; it says so in its last message
            delta.text += self._matcher.push(self._detokenizer.push(token.token_id))
            if self._matcher.matched is not None:
                self.finish_reason = FinishReason.STOP
        self._texts.append(delta.text)
        return delta

    def finish(self, reason: FinishReason, matched_token_id: int | None = None) -> Delta:
        """End the answer for decode's or the client's reason, and hand out the text held back. Harmless when repeated."""
        if self.finish_reason is not None:
            return Delta()
        text = self._matcher.finish()
        self.finish_reason, self.matched_token_id = reason, matched_token_id
        self._texts.append(text)
        return Delta(text=text)
