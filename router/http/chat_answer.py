"""The service's replies to chat completions, whole or in chunks. Knows OpenAI's shapes; knows no connection."""

import uuid
from collections.abc import Collection
from typing import Any

from shoal.pb.v1 import shoal_pb2
from shoal.router.http.answers import stop_reason
from shoal.router.http.chat_question import ChatQuestion
from shoal.router.http.logprobs import TokenNames, chat_logprobs
from shoal.router.tools import CallDelta, CallStyle, TextDelta, ToolCallParser, ToolMode


class ChatChoice:
    """One choice as it grows. Streamed deltas add up to the message of `whole`."""

    def __init__(
        self, index: int, question: ChatQuestion, style: CallStyle, names: TokenNames, eos_token_ids: Collection[int]
    ) -> None:
        self._index = index
        self._wants_logprobs = question.wants_logprobs
        self._parallel = question.parallel_tool_calls
        self._names, self._eos = names, eos_token_ids
        self._parser: ToolCallParser | None = None
        self._is_first = True
        if question.tools is not None and question.tools.choice.mode is not ToolMode.NONE:
            forced = question.tools.choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED)
            self._parser = ToolCallParser(CallStyle.BARE if forced else style, question.tools.names)

    def chunks(self, chunk: shoal_pb2.GenerateStreamChunk) -> list[dict[str, Any]]:
        """The `choices` entries of a delta, each for a chunk of its own."""
        deltas = self._deltas(chunk.text)
        logprobs = chat_logprobs(chunk.output_logprobs, self._names) if self._wants_logprobs and chunk.token_ids else None
        if logprobs and not deltas:
            deltas = [{}]
        return [self._chunk(delta, logprobs if position == 0 else None) for position, delta in enumerate(deltas)]

    def last_chunks(self, complete: shoal_pb2.GenerateComplete) -> list[dict[str, Any]]:
        """What was held back, then the chunk with the finish reason."""
        deltas = self._finish()
        if self._is_first and not deltas:
            deltas = [{"content": ""}]
        chunks = [self._chunk(delta, None) for delta in deltas]
        last = self._chunk({}, None) | {
            "finish_reason": self._finish_reason(complete),
            "stop_reason": stop_reason(complete, self._eos),
        }
        return [*chunks, last]

    def whole(self, complete: shoal_pb2.GenerateComplete) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        calls: list[dict[str, Any]] = []
        for delta in [*self._deltas(complete.text), *self._finish()]:
            if "content" in delta:
                message["content"] = (message["content"] or "") + delta["content"]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        logprobs = {"content": chat_logprobs(complete.output_logprobs, self._names), "refusal": None}
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs if self._wants_logprobs else None,
            "finish_reason": self._finish_reason(complete),
            "stop_reason": stop_reason(complete, self._eos),
        }

    def _deltas(self, text: str) -> list[dict[str, Any]]:
        if self._parser is None:
            return [{"content": text}] if text else []
        return self._told(self._parser.push(text))

    def _finish(self) -> list[dict[str, Any]]:
        return self._told(self._parser.finish()) if self._parser is not None else []

    def _told(self, events: list[TextDelta | CallDelta]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, TextDelta):
                deltas.append({"content": event.text})
            elif self._parallel or event.index == 0:
                deltas.append({"tool_calls": [_call(event)]})
        return deltas

    def _finish_reason(self, complete: shoal_pb2.GenerateComplete) -> str:
        called = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if called and complete.finish_reason == "stop" else complete.finish_reason

    def _chunk(self, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
        if self._is_first:
            self._is_first = False
            delta = {"role": "assistant"} | delta
        told = {"content": logprobs, "refusal": None} if logprobs is not None else None
        return {"index": self._index, "delta": delta, "logprobs": told, "finish_reason": None}


def _call(event: CallDelta) -> dict[str, Any]:
    """One entry of `tool_calls` in a delta."""
    if event.name is None:
        return {"index": event.index, "function": {"arguments": event.arguments}}
    return {
        "index": event.index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": event.name, "arguments": event.arguments},
    }
