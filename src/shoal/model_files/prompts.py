"""Prompts to token ids: chat templates, images' places, tokenisation. Knows the tokenizer and its template; no request limits."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.errors import InvalidConfig, InvalidRequest, Unsupported
from shoal.model_files.tokenizer import Tokenizer
from shoal.model_files.vision import VisionConfig
from shoal.types import PromptImage


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt and the boundary that suits it: the length of its generation prompt, at least 1."""

    token_ids: tuple[int, ...]
    boundary_tokens: int = 1
    images: tuple[PromptImage, ...] = ()  # in order; their tokens are among `token_ids`


class ChatTemplate:
    """A jinja2 chat template, rendered as transformers renders it, in a sandbox."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        """Raises InvalidConfig when the template cannot be read."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._variables = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise InvalidConfig(f"the model's chat template cannot be read: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text. A template that takes no tools leaves them out.

        Raises InvalidRequest with the template's own words when it refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **self._variables
            )
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error


class PromptEncoder:
    """Turns text and chat messages into ids. Thread-safe; long prompts, and images, belong in an executor thread.

    `images` are files, one for each of the model's placeholders in the prompt, in order. Raises Unsupported for them where the
    model sees none, InvalidRequest where their number is another or a file cannot be read.
    """

    template_class: ClassVar[type[ChatTemplate]] = ChatTemplate

    def __init__(self, tokenizer: Tokenizer, vision: VisionConfig | None = None) -> None:
        """Raises InvalidConfig when the template cannot be read, or tokenizer and `vision` do not fit."""
        self._tokenizer = tokenizer
        self._vision = vision
        if vision is not None:
            vision.check_tokenizer(tokenizer.backend.token_to_id)
        source = tokenizer.chat_template
        tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._template = None if source is None else self.template_class(source, **tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def num_generation_tokens(self) -> int:
        """Length of the generation prompt after a plain conversation: what `speed` runs at full depth by default."""
        return self.encode_chat([{"role": "user", "content": "Hello"}]).boundary_tokens

    def encode_text(self, text: str, images: Sequence[bytes] = (), *, add_special_tokens: bool = True) -> Prompt:
        """Ids of plain text, with the special tokens that the tokenizer itself puts around a sequence."""
        ids = tuple(self._tokenizer.encode(self._expand(text, images), add_special_tokens=add_special_tokens))
        return Prompt(ids, images=self._place(ids, images))

    def expand_ids(self, token_ids: Sequence[int], images: Sequence[bytes] = ()) -> Prompt:
        """Ids that hold one placeholder for each image; others are left as they are."""
        if self._vision is None:
            return Prompt(tuple(token_ids), images=self._place(token_ids, images))
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=False)
        ids = self._vision.expand_ids(token_ids, images, encode)
        return Prompt(ids, images=self._place(ids, images))

    def encode_continuation(self, prompt_text: str, prompt_ids: Sequence[int], continuation: str) -> tuple[int, ...]:
        """Ids of a text that goes on after a prompt: what the joined text has beyond the prompt's ids. Where a token would cross
        the border, or the prompt was given as ids (`prompt_text` is ""), the ids of the continuation by itself.
        """
        if prompt_text:
            joined = self._tokenizer.encode(prompt_text + continuation, add_special_tokens=True)
            if joined[: len(prompt_ids)] == list(prompt_ids):
                return tuple(joined[len(prompt_ids) :])
        return tuple(self._tokenizer.encode(continuation, add_special_tokens=False))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        images: Sequence[bytes] = (),
    ) -> Prompt:
        """Ids of a conversation up to the assistant's turn. Raises Unsupported when the model has no chat template."""
        if self._template is None:
            raise Unsupported("this model has no chat template; send `text` or token ids instead of chat messages")
        text = self._expand(self._template.render(messages, tools=tools), images)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        placed = self._place(ids, images)
        history = self._expand(self._template.render(messages, tools=tools, add_generation_prompt=False), images)
        return Prompt(tuple(ids), self._num_generation_tokens(text, ids, history), placed)

    def _expand(self, text: str, images: Sequence[bytes]) -> str:
        return text if self._vision is None else self._vision.expand_text(text, images)

    def _place(self, ids: Sequence[int], images: Sequence[bytes]) -> tuple[PromptImage, ...]:
        if self._vision is not None:
            return self._vision.place(ids, images)
        if images:
            raise Unsupported("this model sees no images; send text alone")
        return ()

    def _num_generation_tokens(self, text: str, ids: Sequence[int], history: str) -> int:
        """How many of the last ids the generation prompt makes up; at least 1."""
        if not text.startswith(history):
            return 1
        tail = self._tokenizer.encode(text[len(history) :], add_special_tokens=False)
        if tail and list(ids[-len(tail) :]) == list(tail):
            return len(tail)
        num_common = 0  # the tail does not stand alone: compare the two prompts token by token
        for mine, theirs in zip(ids, self._tokenizer.encode(history, add_special_tokens=False), strict=False):
            if mine != theirs:
                break
            num_common += 1
        return max(1, len(ids) - num_common)


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; what is inside is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
