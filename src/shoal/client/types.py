"""What the client hands out: frozen, typed, without protobuf. Knows how to read the public messages; makes no call."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Self

from shoal.errors import InternalError, InvalidRequest
from shoal.pb.v1 import shoal_pb2
from shoal.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made; `arguments` is a JSON object, written out."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Image:
    """A picture, as its file holds it: PNG, JPEG, WebP or GIF."""

    data: bytes = field(repr=False)

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Self:
        """From a file. Raises InvalidRequest when there is none, or it cannot be read."""
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            raise InvalidRequest(f"image {os.fspath(path)!r} cannot be read: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is system, user, assistant or tool."""

    role: str
    content: str | Sequence[str | Image] = ""  # user: texts and images, in order
    tool_calls: tuple[ToolCall, ...] = ()  # assistant
    tool_call_id: str = ""  # tool: the call this answers
    name: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new in a stream. Joined, the texts of all chunks of one index are that completion's text."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0  # which of n answers


@dataclass(frozen=True, slots=True)
class Transfer:
    """What crossed from prefill to decode."""

    payload_bytes: int  # counted at the channel
    plan_bytes: int  # the transfer plan's sum
    full_depth_bytes: int  # what visibility `full` would have shipped
    num_entries: int
    prefill_worker: str  # "" when nothing was transferred
    decode_worker: str
    prefill_at: str = ""  # prefill_worker, decode_worker; "": there was nothing to prefill
    prefill_reason: str = ""

    @classmethod
    def read(cls, message: shoal_pb2.TransferStats) -> Self:
        """From the public message."""
        return cls(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds since the router received the request. The first five add up to `ttft_ms`."""

    tokenize_ms: float
    reserve_ms: float
    prefill_ms: float
    transfer_ms: float
    first_step_ms: float
    ttft_ms: float
    tpot_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None  # the stop string or the stop token's id
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    visibility: str  # as resolved, boundary included
    seed: int
    transfer: Transfer
    timings: Timings
    decode_kv_layer_tokens: int
    decode_kv_bytes: int
    num_retries: int
    notices: tuple[str, ...]  # declared fallbacks
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0  # which of n answers
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's second token on; with index 0 only
    prefill_cached_tokens: int = 0  # prompt tokens that prefill did not run; `cached_tokens` are those that decode held
    num_preemptions: int = 0  # how often it gave its blocks up to others and was resumed
    requested_visibility: str = ""  # what the quality gate replaced by `full`; "": `visibility` is what was asked for
    visibility_reason: str = ""  # which bound that had left: agreement, kl
    image_tokens: int = 0  # of the prompt's, those that stand for images

    @classmethod
    def read(cls, request_id: str, message: shoal_pb2.GenerateComplete) -> Self:
        """From the public message."""
        timings = message.timings
        matched = message.WhichOneof("matched_stop")
        return cls(
            request_id=request_id,
            text=message.text,
            token_ids=tuple(message.output_ids),
            finish_reason=FinishReason(message.finish_reason),
            matched_stop=None if matched is None else getattr(message, matched),
            prompt_tokens=message.prompt_tokens,
            completion_tokens=message.completion_tokens,
            cached_tokens=message.cached_tokens,
            visibility=message.visibility,
            seed=message.seed,
            transfer=Transfer.read(message.transfer),
            timings=Timings(**{field.name: getattr(timings, field.name) for field in timings.DESCRIPTOR.fields}),
            decode_kv_layer_tokens=message.decode_kv.layer_tokens,
            decode_kv_bytes=message.decode_kv.bytes,
            num_retries=message.num_retries,
            notices=tuple(message.notices),
            logprobs=read_logprobs(message.output_logprobs),
            index=message.index,
            prompt_logprobs=read_logprobs(message.input_logprobs),
            prefill_cached_tokens=message.prefill_cached_tokens,
            num_preemptions=message.num_preemptions,
            requested_visibility=message.requested_visibility,
            visibility_reason=message.visibility_reason,
            image_tokens=message.image_tokens,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is after a prompt, under a visibility."""

    request_id: str
    token_ids: tuple[int, ...]  # of the continuation
    logprobs: tuple[TokenLogprobs, ...]  # one per token
    total_logprob: float
    is_greedy: bool  # every token was the most likely one
    prompt_tokens: int
    visibility: str  # as resolved, boundary included
    transfer: Transfer

    @classmethod
    def read(cls, message: shoal_pb2.ScoreResponse) -> Self:
        """From the public message."""
        return cls(
            request_id=message.request_id,
            token_ids=tuple(message.logprobs.token_ids),
            logprobs=read_logprobs(message.logprobs),
            total_logprob=message.total_logprob,
            is_greedy=message.is_greedy,
            prompt_tokens=message.prompt_tokens,
            visibility=message.visibility,
            transfer=Transfer.read(message.transfer),
        )


def read_logprobs(message: shoal_pb2.OutputLogProbs) -> tuple[TokenLogprobs, ...]:
    """One per token; () when none were asked for."""
    tops: Sequence[shoal_pb2.TopLogProbs] = message.top_logprobs or [shoal_pb2.TopLogProbs()] * len(message.token_ids)
    return tuple(
        TokenLogprobs(logprob, tuple(zip(top.token_ids, top.values, strict=True)))
        for logprob, top in zip(message.token_logprobs, tops, strict=True)
    )


def read_reply(message: shoal_pb2.GenerateResponse) -> Chunk | Completion:
    """Either kind of a stream's messages."""
    if message.HasField("complete"):
        return Completion.read(message.request_id, message.complete)
    chunk = message.chunk
    return Chunk(chunk.text, tuple(chunk.token_ids), read_logprobs(chunk.output_logprobs), chunk.index)


def only_one(completions: Sequence[Completion]) -> Completion:
    """The answer of a request for one. Raises InternalError when there is none."""
    if not completions:
        raise InternalError("the server ended the stream without an answer")
    return completions[0]
