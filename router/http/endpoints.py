"""The two completion endpoints: translate, call, translate. Knows both shapes and the service; knows no socket."""

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Send

from shoal.pb.v1 import shoal_pb2
from shoal.router.http.answers import Heading
from shoal.router.http.chat_answer import ChatChoice
from shoal.router.http.chat_question import CHAT_FIELDS, read_chat
from shoal.router.http.completion_answer import CompletionChoice, EchoedPrompt
from shoal.router.http.completion_question import COMPLETION_FIELDS, read_completion
from shoal.router.http.errors import answer_error, as_shoal_error
from shoal.router.http.exchange import Exchange, read_fields, send_events, send_json
from shoal.router.http.fields import Fields
from shoal.router.http.logprobs import TokenNames
from shoal.router.http.replies import all_replies
from shoal.router.http.writing import Choice, Writer
from shoal.router.service import RouterService
from shoal.router.tools import CallStyle


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one HTTP request may take."""

    max_body_bytes: int
    body_timeout_s: float
    max_request_s: float

    async def read(self, request: Request) -> Fields:
        return await read_fields(request, self.max_body_bytes, self.body_timeout_s)


class Completions:
    """Both endpoints. They raise shoal.errors, which the app turns into answers."""

    def __init__(self, service: RouterService, limits: HttpLimits) -> None:
        self._service, self._limits = service, limits
        model = service.parts.model
        self._model, self._eos = model.name, model.config.eos_token_ids
        self._names = TokenNames(service.parts.tokenizer)
        self._style = CallStyle.of_template(service.parts.tokenizer.chat_template)

    async def chat(self, request: Request) -> Exchange:
        """POST /v1/chat/completions."""
        question = read_chat(await self._limits.read(request))
        question.request.request_id = request_id(request)
        kind = "chat.completion.chunk" if question.request.stream else "chat.completion"

        def make_choice(prompt: int, index: int) -> Choice:
            return ChatChoice(index, question, self._style, self._names, self._eos)

        heading = Heading(f"chatcmpl-{question.request.request_id}", kind, self._model, self._service.fingerprint)
        writer = Writer(heading, 1, make_choice, question.include_usage)
        return self._exchange([question.request], writer, CHAT_FIELDS)

    async def completions(self, request: Request) -> Exchange:
        """POST /v1/completions."""
        question = read_completion(await self._limits.read(request))
        for one in question.requests:
            one.request_id = request_id(request)
        echoed = [await self._echo(one) for one in question.requests] if question.echo else None

        def make_choice(prompt: int, index: int) -> Choice:
            return CompletionChoice(index, question, echoed[prompt] if echoed else None, self._names, self._eos)

        heading = Heading(f"cmpl-{request_id(request)}", "text_completion", self._model, self._service.fingerprint)
        writer = Writer(heading, question.num_choices, make_choice, question.include_usage, not question.prompt_only)
        return self._exchange(question.requests, writer, COMPLETION_FIELDS)

    async def _echo(self, request: shoal_pb2.GenerateRequest) -> EchoedPrompt:
        """What to repeat; the request goes on with the ids, so that a prompt is tokenised once."""
        if request.HasField("tokenized"):
            prompt_ids = request.tokenized.input_ids
            answer = await self._service.detokenize(shoal_pb2.DetokenizeRequest(token_ids=prompt_ids, model=request.model))
            return EchoedPrompt(answer.text, prompt_ids)
        text, question = request.text, shoal_pb2.TokenizeRequest(text=request.text, model=request.model)
        prompt_ids = (await self._service.tokenize(question)).token_ids
        request.tokenized.input_ids[:] = prompt_ids
        return EchoedPrompt(text, prompt_ids)

    def _exchange(self, requests: Sequence[shoal_pb2.GenerateRequest], writer: Writer, fields: Collection[str]) -> Exchange:
        async def work(send: Send) -> None:
            replies = all_replies(self._service, requests, self._limits.max_request_s)
            if requests[0].stream:
                await send_events(send, writer.events(replies), lambda error: answer_error(as_shoal_error(error), fields))
            else:
                await send_json(send, await writer.whole(replies))

        return Exchange(work)


def request_id(request: Request) -> str:
    """The client's x-request-id, or one of our own; the same for the whole request."""
    if not hasattr(request.state, "request_id"):
        request.state.request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
    return str(request.state.request_id)
