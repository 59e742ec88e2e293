"""The service's replies to text completions, whole or in chunks. Knows OpenAI's shapes; knows no connection."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.pb.v1 import shoal_pb2
from shoal.router.http.answers import stop_reason
from shoal.router.http.completion_question import CompletionQuestion
from shoal.router.http.logprobs import CompletionLogprobs, TokenNames, join_lists


@dataclass(slots=True)
class EchoedPrompt:
    """A prompt that every choice of it repeats. Its log-probabilities come once, with the first reply."""

    text: str
    token_ids: Sequence[int]
    logprobs: shoal_pb2.OutputLogProbs = field(default_factory=shoal_pb2.OutputLogProbs)


class CompletionChoice:
    """One choice as it grows. Streamed texts and lists join to those of `whole`."""

    def __init__(
        self,
        index: int,
        question: CompletionQuestion,
        echoed: EchoedPrompt | None,
        names: TokenNames,
        eos_token_ids: Collection[int],
    ) -> None:
        self._index = index
        self._echoed, self._prompt_only, self._eos = echoed, question.prompt_only, eos_token_ids
        wants_logprobs = question.requests[0].sampling_params.HasField("logprobs")
        self._logprobs = CompletionLogprobs(names) if wants_logprobs else None

    def chunks(self, chunk: shoal_pb2.GenerateStreamChunk) -> list[dict[str, Any]]:
        """The `choices` entries of a delta."""
        text, logprobs = self._take_prompt(chunk.input_logprobs)
        if not self._prompt_only:
            text += chunk.text
            if self._logprobs is not None and chunk.token_ids:
                logprobs = join_lists(logprobs, self._logprobs.answer(chunk.output_logprobs))
        return [self._choice(text, logprobs)] if text or logprobs else []

    def last_chunks(self, complete: shoal_pb2.GenerateComplete) -> list[dict[str, Any]]:
        """The chunk with the finish reason."""
        text, logprobs = self._take_prompt(complete.input_logprobs)  # not told yet when nothing was generated
        return [self._choice(text, logprobs) | self._end(complete)]

    def whole(self, complete: shoal_pb2.GenerateComplete) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        text, logprobs = self._take_prompt(complete.input_logprobs)
        if not self._prompt_only:
            text += complete.text
            if self._logprobs is not None:
                logprobs = join_lists(logprobs, self._logprobs.answer(complete.output_logprobs))
        return self._choice(text, logprobs) | self._end(complete)

    def _take_prompt(self, message: shoal_pb2.OutputLogProbs) -> tuple[str, dict[str, Any] | None]:
        """The prompt's text and lists, once."""
        echoed, self._echoed = self._echoed, None
        if echoed is None:
            return "", None
        if message.token_ids:
            echoed.logprobs = message
        lists = self._logprobs.prompt(echoed.token_ids, echoed.logprobs) if self._logprobs is not None else None
        return echoed.text, lists

    def _choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _end(self, complete: shoal_pb2.GenerateComplete) -> dict[str, Any]:
        reason = "length" if self._prompt_only else complete.finish_reason
        return {"finish_reason": reason, "stop_reason": stop_reason(complete, self._eos)}
