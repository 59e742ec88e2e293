"""Text to token ids and back, as the model's own files define it. Renders no chat template and knows no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import tokenizers

from shoal.model_files.gguf_tokenizer import read_gguf_tokenizer
from shoal.model_files.hf_tokenizer import read_hf_tokenizer
from shoal.model_files.model import ModelFiles
from shoal.model_files.tensors import FileFormat


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A model's tokenizer. Thread-safe."""

    backend: tokenizers.Tokenizer = field(repr=False)
    chat_template: str | None  # jinja2 source
    bos_token: str | None
    eos_token: str | None

    @property
    def vocab_size(self) -> int:
        """Tokens it knows; the model's own vocabulary may be padded beyond."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.backend.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.backend.token_to_id(self.eos_token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written out in it are recognised; `add_special_tokens` adds those that the tokenizer
        puts around a sequence (Llama 3's BOS; none for SmolLM2 and Qwen): leave it off for a rendered chat template. Bytes
        that the vocabulary lacks leave nothing (SmolLM2 has no U+0006), so a text can come out empty."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


def load_tokenizer(model: ModelFiles) -> Tokenizer:
    """The tokenizer in a model's files. Raises InvalidConfig when it is missing or of a kind that is not supported."""
    if model.format is FileFormat.GGUF:
        return Tokenizer(*read_gguf_tokenizer(model.path))
    return Tokenizer(*read_hf_tokenizer(model.path))
