"""Log-probabilities in OpenAI's two shapes. Knows how tokens are written; knows no request."""

import codecs
from collections.abc import Sequence
from typing import Any, Final

from shoal.model_files import Tokenizer
from shoal.pb.v1 import shoal_pb2

_LOWEST: Final = -9999.0  # JSON knows no minus infinity


class TokenNames:
    """Tokens as clients see them. A token that is half a character is written `bytes:\\xe2\\x80`, so that no two look alike."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def raw(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int) -> str:
        token = self.raw(token_id)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

    def shown(self, token_id: int) -> bytes:
        """What the token leaves in the text: nothing for a special one."""
        return b"" if self._tokenizer.decode([token_id]) == "" else self.raw(token_id)


def chat_logprobs(message: shoal_pb2.OutputLogProbs, names: TokenNames) -> list[dict[str, Any]]:
    """The `content` of a chat choice's logprobs."""
    return [
        _entry(token_id, logprob, names)
        | {"top_logprobs": [_entry(i, value, names) for i, value in zip(top.token_ids, top.values, strict=True)]}
        for token_id, logprob, top in _rows(message)
    ]


def _entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {"token": names.name(token_id), "logprob": _finite(logprob), "bytes": list(names.raw(token_id))}


class CompletionLogprobs:
    """Parallel lists, offsets counted over everything that was added: the prompt first when it is echoed."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    def prompt(self, prompt_ids: Sequence[int], message: shoal_pb2.OutputLogProbs) -> dict[str, Any]:
        """The prompt's tokens; the first has no log-probability."""
        rows = list(_rows(message))[-(len(prompt_ids) - 1) :] if len(prompt_ids) > 1 else []
        lists = self._lists([prompt_ids[0], *(token_id for token_id, _, _ in rows)])
        lists["token_logprobs"] = [None, *(_finite(logprob) for _, logprob, _ in rows)]
        lists["top_logprobs"] = [None, *(self._top(*row) for row in rows)]
        return lists

    def answer(self, message: shoal_pb2.OutputLogProbs) -> dict[str, Any]:
        """Generated tokens."""
        rows = list(_rows(message))
        lists = self._lists([token_id for token_id, _, _ in rows])
        lists["token_logprobs"] = [_finite(logprob) for _, logprob, _ in rows]
        lists["top_logprobs"] = [self._top(*row) for row in rows]
        return lists

    def _lists(self, token_ids: Sequence[int]) -> dict[str, Any]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._names.shown(token_id)))
        return {"tokens": [self._names.name(token_id) for token_id in token_ids], "text_offset": offsets}

    def _top(self, token_id: int, logprob: float, top: shoal_pb2.TopLogProbs) -> dict[str, float]:
        """Best first; the token itself is always among them."""
        found = {self._names.name(i): _finite(value) for i, value in zip(top.token_ids, top.values, strict=True)}
        return found | {self._names.name(token_id): _finite(logprob)}


def join_lists(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """The prompt's lists and the answer's, one after the other."""
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


def _rows(message: shoal_pb2.OutputLogProbs) -> list[tuple[int, float, shoal_pb2.TopLogProbs]]:
    tops = message.top_logprobs or [shoal_pb2.TopLogProbs()] * len(message.token_ids)
    return list(zip(message.token_ids, message.token_logprobs, tops, strict=True))


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
