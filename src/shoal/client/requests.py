"""Builds the public request and maps a call's error back. Shared by both clients; makes no call."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

import grpc

from shoal.client.types import Message
from shoal.errors import InvalidRequest, ShoalError, Unavailable
from shoal.pb.v1 import shoal_pb2
from shoal.rpc import error_from_rpc

Prompt: TypeAlias = str | Sequence[Message]
_UNREACHABLE: Final = ("failed to connect", "dns resolution failed", "connections to all backends failing")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to pick tokens; what is None is left to the server: greedy, to the context limit, a drawn seed."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    seed: int | None = None
    logprobs: int | None = None


def build_request(
    prompt: Prompt | None,
    *,
    system: str | None,
    raw: bool,
    token_ids: Sequence[int] | None,
    sampling: Sampling | None,
    visibility: str | None,
    request_id: str,
    stream: bool,
) -> shoal_pb2.GenerateRequest:
    """A text is one user message, unless `raw`. Raises InvalidRequest for a prompt given twice, or not at all."""
    if (prompt is None) == (token_ids is None):
        raise InvalidRequest(
            "give either a prompt or token ids, not both" if prompt is not None else "give a prompt or token ids"
        )
    request = shoal_pb2.GenerateRequest(request_id=request_id, stream=stream, visibility=visibility)
    try:
        fields = {name: value for name, value in asdict(sampling or Sampling()).items() if value is not None}
        request.sampling_params.CopyFrom(shoal_pb2.SamplingParams(**fields))
        if token_ids is not None:
            request.tokenized.SetInParent()
            request.tokenized.input_ids.extend(token_ids)
    except (ValueError, TypeError) as error:  # protobuf refuses what the field cannot hold
        raise InvalidRequest(f"a sampling value or token id is out of range: {error}") from error
    if token_ids is not None:
        if system is not None or raw:
            raise InvalidRequest("token ids are a whole prompt: leave out `system` and `raw`")
    elif raw:
        if system is not None or not isinstance(prompt, str):
            raise InvalidRequest("a raw prompt is one text: leave out `system`, or send chat messages without `raw`")
        request.text = prompt
    elif prompt is not None:
        messages = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
        if system is not None:
            messages.insert(0, Message("system", system))
        request.chat.messages.extend(shoal_pb2.ChatMessage(role=m.role, content=m.content) for m in messages)
        request.chat.SetInParent()
    return request


def read_error(error: grpc.RpcError, address: str) -> ShoalError:
    """The error of a failed call; one line when nobody answers at the address."""
    mapped = error_from_rpc(error)
    if isinstance(mapped, Unavailable) and str(mapped).lower().startswith(_UNREACHABLE):
        return Unavailable(f"no server answers at {address}; start one with `shoal serve` or check the address")
    return mapped
