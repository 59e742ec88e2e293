"""One answer as it grows: ids, text, log-probabilities, its end. Knows tokens and strings; no transport and no time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.router.detokenizer import Detokenizer
from shoal.router.stop_strings import StopMatcher
from shoal.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One sampled (or scored) token as decode sent it."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first
    index: int = 0  # of the child


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's tokens after the first. Comes once, before any token."""

    tokens: tuple[OutputToken, ...]


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """Decode has nothing more to say about one child."""

    index: int
    reason: FinishReason
    matched_token_id: int | None = None


Output: TypeAlias = OutputToken | PromptLogprobs | ChildEnd


@dataclass(slots=True)
class Delta:
    """What is new about one child since its last delta."""

    index: int = 0
    tokens: list[OutputToken] = field(default_factory=list)
    text: str = ""
    prompt_logprobs: PromptLogprobs | None = None  # with the request's first delta
    ends: bool = False  # the child's answer is complete

    def __bool__(self) -> bool:
        return bool(self.tokens or self.text or self.prompt_logprobs)


class Answer:
    """Collects one child's tokens. The joined texts of all deltas are `text`; `tokens` are all that were generated, a stop token
    included.

    A stop token (EOS or one the client named) leaves no text; a stop string and what follows it neither, unless the request
    wants its stops shown. A stop string that the first `min_tokens` tokens complete is text like any other.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], sampling: SamplingParams, index: int = 0) -> None:
        self.index = index
        self.tokens: list[OutputToken] = []
        self.finish_reason: FinishReason | None = None
        self.matched_token_id: int | None = None
        self._detokenizer = Detokenizer(decode)
        self._shows_stop = sampling.include_stop_str_in_output
        self._matcher = StopMatcher(sampling.stop, shows_stop=self._shows_stop)
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
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
        delta = Delta(self.index)
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.tokens.append(token)
            delta.tokens.append(token)
            if token.token_id in self._stop_token_ids and not self._shows_stop:
                continue  # decode ends here too; it says so in its last message
            text = self._detokenizer.push(token.token_id)
            delta.text += self._matcher.push(text, may_match=len(self.tokens) > self._min_tokens)
            if self._matcher.matched is not None:
                self.finish_reason = FinishReason.STOP
                delta.ends = True
        self._texts.append(delta.text)
        return delta

    def finish(self, reason: FinishReason, matched_token_id: int | None = None) -> Delta:
        """End the answer for decode's or the client's reason, and hand out the text held back. Harmless when repeated."""
        if self.finish_reason is not None:
            return Delta(self.index)
        text = self._matcher.finish()
        self.finish_reason, self.matched_token_id = reason, matched_token_id
        self._texts.append(text)
        return Delta(self.index, text=text, ends=True)
