"""From a public request to what the legs are told: checked, tokenised, resolved. Knows the order of checks; sends nothing."""

import asyncio
import secrets
import uuid
from dataclasses import dataclass
from typing import Final

from shoal.errors import InvalidConfig, InvalidRequest
from shoal.pb.v1 import shoal_pb2
from shoal.router.attempt import DispatchRequest
from shoal.router.text import Prompt, PromptEncoder
from shoal.router.validation import (
    SEED_BITS,
    RequestLimits,
    check_messages,
    check_prompt_length,
    check_request_id,
    check_sampling,
    check_text,
    check_token_ids,
    check_visibility,
)
from shoal.visibility import VisibilityKind

_MAX_CHARACTERS_PER_TOKEN: Final = 256  # no vocabulary has longer tokens
_MESSAGE_CHARACTERS: Final = 32  # what a chat template puts around one, roughly
_INLINE_CHARACTERS: Final = 2_000  # longer prompts are tokenised in a thread, so that streams go on meanwhile


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may run."""

    dispatch: DispatchRequest
    streams: bool

    @property
    def request_id(self) -> str:
        return self.dispatch.request_id

    @property
    def policy(self) -> str:
        """The visibility without its boundary: a label with few values."""
        return str(self.dispatch.visibility.policy)


class Admission:
    """Raises InvalidRequest (or Unsupported) before anything is sent to a worker."""

    def __init__(self, encoder: PromptEncoder, limits: RequestLimits) -> None:
        """Raises InvalidConfig when the default boundary of `speed` would break the operator's own limit."""
        self.limits = limits
        self._encoder = encoder
        boundary = encoder.num_generation_tokens if encoder.has_chat_template else 1
        uses_default = any(v.kind is VisibilityKind.SPEED and v.boundary_tokens is None for v in limits.visibilities)
        if uses_default and boundary > limits.max_boundary_tokens:
            raise InvalidConfig(
                f"the chat template's generation prompt has {boundary} tokens, the default boundary of `speed`, but "
                f"max_boundary_tokens is {limits.max_boundary_tokens}; raise it to {boundary} or more"
            )

    async def admit(self, request: shoal_pb2.GenerateRequest, deadline: float) -> Admitted:
        """Check and translate; what needs no tokenising first."""
        check_request_id(request.request_id)
        wanted = check_visibility(request.visibility if request.HasField("visibility") else None, self.limits)
        prompt = await self._prompt(request)
        check_prompt_length(len(prompt.token_ids), self.limits.max_context)
        sampling = check_sampling(request.sampling_params, self.limits, len(prompt.token_ids), secrets.randbits(SEED_BITS))
        boundary = prompt.boundary_tokens if wanted.kind is VisibilityKind.SPEED else 1
        dispatch = DispatchRequest(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt_ids=prompt.token_ids,
            visibility=wanted.resolve(self.limits.num_layers, boundary),
            sampling=sampling,
            deadline=deadline,
        )
        return Admitted(dispatch, request.stream)

    async def _prompt(self, request: shoal_pb2.GenerateRequest) -> Prompt:
        match request.WhichOneof("input"):
            case "text":
                check_text(request.text)
                self._check_characters(len(request.text))
                if len(request.text) <= _INLINE_CHARACTERS:
                    return self._encoder.encode_text(request.text)
                return await asyncio.to_thread(self._encoder.encode_text, request.text)
            case "chat":
                # every message has a token at least, and is worked on even when it says nothing
                check_prompt_length(max(1, len(request.chat.messages)), self.limits.max_context, at_least=True)
                messages = check_messages(request.chat)
                num_characters = sum(len(message["content"]) for message in messages)
                self._check_characters(num_characters)
                if num_characters + _MESSAGE_CHARACTERS * len(messages) <= _INLINE_CHARACTERS:
                    return self._encoder.encode_chat(messages)
                return await asyncio.to_thread(self._encoder.encode_chat, messages)
            case "tokenized":
                token_ids = request.tokenized.input_ids
                check_prompt_length(len(token_ids), self.limits.max_context)
                check_token_ids(token_ids, self.limits.vocab_size)
                return Prompt(tuple(token_ids))
        raise InvalidRequest("the request has no input; send `text`, `chat` or `tokenized`")

    def _check_characters(self, num_characters: int) -> None:
        """Refuse by length alone what no tokenisation could fit into the context."""
        check_prompt_length(max(1, num_characters // _MAX_CHARACTERS_PER_TOKEN), self.limits.max_context, at_least=True)
