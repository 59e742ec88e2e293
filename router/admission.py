"""From a public request to what the legs are told: checked, tokenised, resolved. Knows the order of checks; sends nothing."""

import asyncio
import secrets
from dataclasses import dataclass, replace
from typing import Final

from shoal.config.images import ImageLimits
from shoal.constraints import ConstraintVetter
from shoal.errors import InvalidConfig, InvalidRequest
from shoal.pb.v1 import shoal_pb2
from shoal.router.field_sizes import check_sizes
from shoal.router.images import ImageCheck
from shoal.router.legs import DispatchRequest
from shoal.router.quality import QualityGates
from shoal.router.sampling import (
    MAX_LOGPROBS,
    SEED_BITS,
    check_num_children,
    check_prompt_logprobs,
    check_sampling,
    read_constraint,
)
from shoal.router.tenants import turn_of
from shoal.router.text import Prompt, PromptEncoder
from shoal.router.tools import Tools, check_parts, read_messages, read_tools
from shoal.router.validation import (
    RequestLimits,
    check_model,
    check_prompt_length,
    check_text,
    check_token_ids,
    check_visibility,
)
from shoal.types import SamplingParams
from shoal.visibility import Visibility, VisibilityKind

_MAX_CHARACTERS_PER_TOKEN: Final = 256  # no vocabulary has longer tokens
_PROMPT_ON_DECODE: Final = "prompt_logprobs: the whole prompt was run on decode, none of it on prefill"
_MESSAGE_CHARACTERS: Final = 32  # what a chat template puts around one, roughly
_INLINE_CHARACTERS: Final = 2_000  # longer prompts are tokenised in a thread, so that streams go on meanwhile


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may run."""

    dispatch: DispatchRequest
    streams: bool
    requested: Visibility | None = None  # what the quality gate replaced by `full`, resolved
    reason: str = ""  # which bound it had left

    @property
    def asked(self) -> Visibility:
        """The visibility that was asked for, resolved."""
        return self.requested or self.dispatch.visibility

    @property
    def request_id(self) -> str:
        return self.dispatch.request_id

    @property
    def policy(self) -> str:
        """The visibility without its boundary: a label with few values."""
        return str(self.dispatch.visibility.policy)


class Admission:
    """Raises InvalidRequest (or Unsupported) before anything is sent to a worker."""

    def __init__(
        self,
        encoder: PromptEncoder,
        limits: RequestLimits,
        constraints: ConstraintVetter,
        gates: QualityGates = QualityGates(),  # noqa: B008  (holds none)
        images: ImageCheck | None = None,
    ) -> None:
        """`gates`: which visibilities are served at full depth instead. `images` None: none are taken.

        Raises InvalidConfig when the default boundary of `speed` would break the operator's own limit.
        """
        self.limits = limits
        self._encoder = encoder
        self._constraints = constraints
        self._gates = gates
        self.images = images or ImageCheck(None, ImageLimits(), limits.num_layers)
        boundary = encoder.num_generation_tokens if encoder.has_chat_template else 1
        uses_default = any(v.kind is VisibilityKind.SPEED and v.boundary_tokens is None for v in limits.visibilities)
        if uses_default and boundary > limits.max_boundary_tokens:
            raise InvalidConfig(
                f"the chat template's generation prompt has {boundary} tokens, the default boundary of `speed`, but "
                f"max_boundary_tokens is {limits.max_boundary_tokens}; raise it to {boundary} or more"
            )

    async def admit(self, request: shoal_pb2.GenerateRequest, deadline: float) -> Admitted:
        """Check and translate; what needs no tokenising first."""
        check_sizes(request)
        check_model(request.model, self.limits.model)
        turn, notices = turn_of(request.priority)
        wanted = check_visibility(request.visibility if request.HasField("visibility") else None, self.limits)
        tools = read_tools(request.chat.tools_json, request.chat.tool_choice_json)
        num_children = check_num_children(request.sampling_params)
        prompt_logprobs = check_prompt_logprobs(request.sampling_params, wanted.resolve(self.limits.num_layers))
        sampling_params = _with_forced_call(request, tools)
        await self._check_constraint(sampling_params)
        prompt = await self._prompt(request, tools)
        check_prompt_length(len(prompt.token_ids), self.limits.max_context)
        sampling = check_sampling(sampling_params, self.limits, len(prompt.token_ids), secrets.randbits(SEED_BITS))
        boundary = prompt.boundary_tokens if wanted.kind is VisibilityKind.SPEED else 1
        visibility = wanted.resolve(self.limits.num_layers, boundary)
        requested, reason = None, ""
        if (fallback := self._gates.fallback(visibility)) is not None:
            requested, reason = visibility, str(fallback.bound)
            visibility, notices = Visibility(boundary_tokens=wanted.boundary_tokens or 1), (*notices, fallback.notice)
            self._gates.replaced(requested)
        if prompt_logprobs is not None:
            visibility, notices = replace(visibility, boundary_tokens=len(prompt.token_ids)), (*notices, _PROMPT_ON_DECODE)
        self.images.placement(prompt.images, prompt.token_ids, visibility, scores_prompt=prompt_logprobs is not None)
        dispatch = DispatchRequest(
            request_id=request.request_id or secrets.token_hex(16),
            prompt_ids=prompt.token_ids,
            images=prompt.images,
            visibility=visibility,
            sampling=sampling,
            deadline=deadline,
            num_children=num_children,
            prompt_logprobs=prompt_logprobs,
            notices=notices,
            turn=turn,
            cache_salt=request.cache_salt,
        )
        return Admitted(dispatch, request.stream, requested, reason)

    async def tokenize(self, request: shoal_pb2.GenerateRequest, *, add_special_tokens: bool = True) -> Prompt:
        """The input's ids alone; nothing else of the request is looked at but its model."""
        check_sizes(request)
        check_model(request.model, self.limits.model)
        if request.HasField("text") and not add_special_tokens:
            self._check_characters(len(request.text))
            files = self.images.files(request.images, self.limits.max_context)
            return await asyncio.to_thread(self._encoder.encode_text, request.text, files, add_special_tokens=False)
        return await self._prompt(request, read_tools(request.chat.tools_json, request.chat.tool_choice_json))

    async def _check_constraint(self, message: shoal_pb2.SamplingParams) -> None:
        """A client hears of its mistake before any work is done."""
        constraint = read_constraint(message)
        if constraint is not None:
            await self._constraints.check(constraint)

    async def admit_score(self, request: shoal_pb2.ScoreRequest, deadline: float) -> Admitted:
        """The same for a continuation to be scored."""
        check_sizes(request)
        check_model(request.model, self.limits.model)
        turn, notices = turn_of(request.priority)
        wanted = check_visibility(request.visibility if request.HasField("visibility") else None, self.limits)
        if not 0 <= request.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must lie in 0…{MAX_LOGPROBS}, not {request.logprobs}")
        given = shoal_pb2.GenerateRequest(images=request.images)
        match request.WhichOneof("prompt"):
            case "text":
                given.text = request.text
            case "tokenized":
                given.tokenized.CopyFrom(request.tokenized)
        prompt = await self._prompt(given, None)
        check_prompt_length(len(prompt.token_ids), self.limits.max_context)
        continuation = await self._continuation(request, prompt.token_ids)
        num_tokens = len(prompt.token_ids) + len(continuation)
        if num_tokens > self.limits.max_context:
            raise InvalidRequest(
                f"prompt ({len(prompt.token_ids)} tokens) + continuation ({len(continuation)}) exceed the context limit of "
                f"{self.limits.max_context}: shorten one of them"
            )
        visibility = wanted.resolve(self.limits.num_layers, 1)
        self.images.placement(prompt.images, prompt.token_ids, visibility)
        dispatch = DispatchRequest(
            request_id=request.request_id or secrets.token_hex(16),
            prompt_ids=prompt.token_ids,
            images=prompt.images,
            visibility=visibility,
            sampling=SamplingParams(1, num_logprobs=request.logprobs),
            deadline=deadline,
            continuation_ids=continuation,
            notices=notices,
            turn=turn,
            cache_salt=request.cache_salt,
        )
        return Admitted(dispatch, streams=False)

    async def _continuation(self, request: shoal_pb2.ScoreRequest, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        token_ids: tuple[int, ...] = ()
        match request.WhichOneof("continuation"):
            case "continuation_text":
                self._check_characters(len(request.text) + len(request.continuation_text))
                encode, text = self._encoder.encode_continuation, request.continuation_text
                token_ids = await asyncio.to_thread(encode, request.text, prompt_ids, text)
            case "continuation_tokenized":
                token_ids = tuple(request.continuation_tokenized.input_ids)
                if len(token_ids) <= self.limits.max_context:  # a longer one is refused for its length
                    check_token_ids(token_ids, self.limits.vocab_size, "continuation_tokenized.input_ids")
        if not token_ids:
            raise InvalidRequest(
                "the continuation is empty; send `continuation_text` or `continuation_tokenized` of at least one token"
            )
        return token_ids

    async def _prompt(self, request: shoal_pb2.GenerateRequest, tools: Tools | None) -> Prompt:
        encoder, kind = self._encoder, request.WhichOneof("input")
        if kind == "chat" and request.images:
            raise InvalidRequest("images go with `text` and `tokenized`; in `chat` they are parts of a message's content")
        match kind:
            case "text":
                check_text(request.text)
                self._check_characters(len(request.text))
                files = self.images.files(request.images, self.limits.max_context)
                if len(request.text) <= _INLINE_CHARACTERS and not files:
                    return encoder.encode_text(request.text)
                return await asyncio.to_thread(encoder.encode_text, request.text, files)
            case "chat":
                return await self._chat_prompt(request.chat, tools)
            case "tokenized":
                token_ids = request.tokenized.input_ids
                check_prompt_length(len(token_ids), self.limits.max_context)
                check_token_ids(token_ids, self.limits.vocab_size)
                files = self.images.files(request.images, self.limits.max_context)
                return await asyncio.to_thread(encoder.expand_ids, token_ids, files) if files else encoder.expand_ids(token_ids)
        raise InvalidRequest("the request has no input; send `text`, `chat` (not to Score) or `tokenized`")

    async def _chat_prompt(self, chat: shoal_pb2.ChatInput, tools: Tools | None) -> Prompt:
        # every message has a token at least, and is worked on even when it says nothing
        num_messages = len(chat.messages)
        check_prompt_length(max(1, num_messages), self.limits.max_context, at_least=True)
        for index, message in enumerate(chat.messages):
            check_sizes(message, f"chat.messages[{index}]")
        parts = check_parts(chat)
        offered = tools.offered if tools is not None else ()
        num_characters = sum(len(m.content) + len(m.tool_calls_json) for m in chat.messages)
        num_characters += sum(len(part.text) for part in parts)
        num_characters += len(chat.tools_json) if offered else 0
        self._check_characters(num_characters)
        files = self.images.files([part.image for part in parts if part.HasField("image")], self.limits.max_context)
        messages = read_messages(chat)
        if num_characters + _MESSAGE_CHARACTERS * num_messages <= _INLINE_CHARACTERS and not files:
            return self._encoder.encode_chat(messages, offered)
        return await asyncio.to_thread(self._encoder.encode_chat, messages, offered, files)

    def _check_characters(self, num_characters: int) -> None:
        """Refuse by length alone what no tokenisation could fit into the context."""
        check_prompt_length(max(1, num_characters // _MAX_CHARACTERS_PER_TOKEN), self.limits.max_context, at_least=True)


def _with_forced_call(request: shoal_pb2.GenerateRequest, tools: Tools | None) -> shoal_pb2.SamplingParams:
    """The sampling parameters, held to the calls that `tool_choice` demands. Raises InvalidRequest for two constraints."""
    schema = tools.call_schema() if tools is not None else None
    if schema is None:
        return request.sampling_params
    if (constraint := request.sampling_params.WhichOneof("constraint")) is not None:
        raise InvalidRequest(f"tool_choice demands a call and {constraint} another form of answer; give one of them")
    sampling = shoal_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling_params)
    sampling.json_schema = schema
    return sampling
