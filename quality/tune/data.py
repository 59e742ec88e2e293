"""Records to what is trained on: plain texts as one row of tokens, prompts with responses as windows. Knows no weights."""

import random
from collections.abc import Sequence
from typing import Final

import numpy as np

from shoal.errors import InvalidConfig
from shoal.model_files import ModelFiles, PromptEncoder, load_tokenizer
from shoal.quality.data import Record, to_example
from shoal.quality.tune.batch import Span, Window
from shoal.quality.tune.options import TuneOptions
from shoal.quality.tune.windows import TrainingTokens, excerpts
from shoal.visibility import VisibilityKind

_TEXTS_AT_ONCE: Final = 64
_SEPARATOR: Final = "\n\n"


def training_tokens(records: Sequence[Record], model: ModelFiles, options: TuneOptions, *, chat: bool = False) -> TrainingTokens:
    """Tokenise in an order that the seed fixes; of plain texts no more than `options.tokens`, which is all that is looked at.

    Raises InvalidConfig for a record that cannot be used or data with nothing to learn from.
    """
    tokenizer = load_tokenizer(model)
    encoder, order = PromptEncoder(tokenizer), list(records)
    random.Random(options.seed).shuffle(order)
    plain = [record.text for record in order if record.text is not None]
    row: list[int] = []
    for start in range(0, len(plain), _TEXTS_AT_ONCE):
        if len(row) >= options.tokens + options.sequence_tokens:
            break
        for text in plain[start : start + _TEXTS_AT_ONCE]:
            row += tokenizer.encode(text + _SEPARATOR, add_special_tokens=False)
    given = []
    for record in (record for record in order if record.text is None):
        example = to_example(record, encoder, tokenizer, model, chat=chat)
        boundary = _boundary(options, encoder, is_chat=chat or bool(record.messages))
        start = max(0, len(example.prompt_ids) - boundary)
        silent = len(example.prompt_ids) - 1 - start
        ids = (*example.prompt_ids, *example.response_ids)
        given.append(Window(ids, (Span(start, len(ids), silent),)))
    tokens = TrainingTokens(np.array(row, np.int32), tuple(given), tokenizer.bos_token_id)
    tokens.check(options)
    return tokens


def held_out_windows(
    records: Sequence[Record],
    model: ModelFiles,
    *,
    prompt_tokens: int = 512,
    response_tokens: int = 64,
    count: int = 24,
    seed: int = 0,
    boundary: int = 1,
) -> list[Window]:
    """Prompts with their continuations, from plain texts; `boundary` prompt tokens run at full depth. Raises InvalidConfig when
    no text is long enough."""
    tokenizer = load_tokenizer(model)
    texts = [record.text for record in records if record.text is not None]
    random.Random(seed).shuffle(texts)
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts[: 8 * count]]
    if not rows:
        raise InvalidConfig('held-out data holds no {"text": …}; perplexity is measured on continuations of plain texts')
    return excerpts(rows, prompt_tokens, response_tokens, count, seed, boundary=min(boundary, prompt_tokens))


def _boundary(options: TuneOptions, encoder: PromptEncoder, *, is_chat: bool) -> int:
    """As the router resolves it: the chat template's generation prompt for `speed`, else 1."""
    if options.visibility.boundary_tokens is not None:
        return options.visibility.boundary_tokens
    return max(1, encoder.num_generation_tokens) if is_chat and options.visibility.kind is VisibilityKind.SPEED else 1
