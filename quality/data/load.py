"""Records to examples of token ids: tokenised, cut, checked against the context. Knows a model's tokenizer, no weights."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InvalidConfig, Unsupported
from shoal.model_files import ModelFiles, PromptEncoder, Tokenizer, load_tokenizer
from shoal.quality.data.records import Record, read_jsonl
from shoal.quality.data.shipped import shipped_records
from shoal.quality.torch_model import Example


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How records become examples."""

    max_examples: int = 24
    prompt_tokens: int = 512  # of a plain text
    response_tokens: int = 64  # of a plain text
    chat: bool = False  # prompts go through the chat template
    seed: int = 0  # which excerpts of plain texts

    def __post_init__(self) -> None:
        for name in ("max_examples", "prompt_tokens", "response_tokens"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class LoadedData:
    """Examples, and where they are from."""

    name: str
    examples: tuple[Example, ...]
    boundary_tokens: int  # what `speed` runs at full depth unless told otherwise: the generation prompt's length, or 1

    @property
    def num_response_tokens(self) -> int:
        return sum(len(example.response_ids) for example in self.examples)


def load_data(source: str, model: ModelFiles, options: DataOptions) -> LoadedData:
    """Read a .jsonl file, or a shipped text by name.

    Raises InvalidConfig for data that cannot be used: nothing long enough, a line without a response, one beyond the context.
    """
    records = read_records(source)
    tokenizer = load_tokenizer(model)
    encoder = PromptEncoder(tokenizer)
    plain = [record for record in records if record.text is not None]
    given = [record for record in records if record.text is None][: options.max_examples]
    max_tokens = model.config.shape.max_context
    examples = [to_example(record, encoder, tokenizer, model, chat=options.chat) for record in given]
    is_chat = options.chat or any(record.messages for record in given)
    if plain:
        examples += _excerpts(plain, tokenizer, options, max_tokens, source)
    boundary = encoder.num_generation_tokens if is_chat else 1
    return LoadedData(source, tuple(examples[: options.max_examples]), boundary)


def read_records(source: str) -> list[Record]:
    """The lines of a .jsonl file, or a shipped text by name. Raises InvalidConfig."""
    return read_jsonl(Path(source)) if source.endswith((".jsonl", ".json")) else shipped_records(source)


def to_example(record: Record, encoder: PromptEncoder, tokenizer: Tokenizer, model: ModelFiles, *, chat: bool = False) -> Example:
    """A prompt with its response; a chat's response ends with the model's end token."""
    response = record.response or ""
    if record.messages or chat:
        messages: Sequence[object] = record.messages or [{"role": "user", "content": record.prompt}]
        if not encoder.has_chat_template:
            raise Unsupported(f"{record.where} is a conversation, and this model has no chat template; give prompt and response")
        prompt = encoder.encode_chat(messages).token_ids  # type: ignore[arg-type]
        ids = (*tokenizer.encode(response, add_special_tokens=False), *model.config.eos_token_ids[:1])
    else:
        prompt = encoder.encode_text(record.prompt or "").token_ids
        ids = encoder.encode_continuation(record.prompt or "", prompt, response)
    if not prompt or not ids:
        raise InvalidConfig(f"{record.where}: prompt or response comes out of the tokenizer empty")
    if len(prompt) + len(ids) > (max_tokens := model.config.shape.max_context):
        raise InvalidConfig(
            f"{record.where} has {len(prompt)} + {len(ids)} tokens, which exceeds the model's context of {max_tokens}; shorten it"
        )
    return Example(tuple(prompt), tuple(ids))


def _excerpts(
    records: Sequence[Record], tokenizer: Tokenizer, options: DataOptions, max_tokens: int, source: str
) -> list[Example]:
    """Excerpts that do not overlap, from the texts in turn, in an order that the seed fixes."""
    length = options.prompt_tokens + options.response_tokens
    if length > max_tokens:
        raise InvalidConfig(
            f"{options.prompt_tokens} + {options.response_tokens} tokens exceed the model's context of {max_tokens}"
        )
    rng = random.Random(options.seed)
    order = list(records)
    rng.shuffle(order)
    texts: deque[list[Example]] = deque()
    num_cut = 0
    for record in order:
        if num_cut >= 4 * options.max_examples and len(texts) >= options.max_examples:
            break
        ids = tokenizer.encode(record.text or "")
        cuts = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        rng.shuffle(cuts)
        if cuts:
            num_cut += len(cuts)
            texts.append([Example(tuple(cut[: options.prompt_tokens]), tuple(cut[options.prompt_tokens :])) for cut in cuts])
    if not texts:
        raise InvalidConfig(
            f"data {source!r} has no text of {length} tokens ({options.prompt_tokens} of prompt and {options.response_tokens} of "
            "continuation); give longer texts or ask for fewer tokens"
        )
    examples: list[Example] = []
    while texts and len(examples) < options.max_examples:
        own = texts.popleft()
        examples.append(own.pop())
        if own:
            texts.append(own)
    return examples
