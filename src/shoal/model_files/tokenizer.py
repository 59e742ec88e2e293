"""Text to token ids and back, as the model's own files define it. Renders no chat template and knows no torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import tokenizers

from shoal.model_files.gguf_tokenizer import read_gguf_tokenizer
from shoal.model_files.hf_tokenizer import read_hf_tokenizer
from shoal.model_files.model import ModelFiles
from shoal.model_files.tensors import FileFormat


def _byte_of_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_of_characters()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
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

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, also when they are half a character; a special token's own name."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF[char] for char in token) if all(char in _BYTE_OF for char in token) else token.encode()
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self.backend.decoder)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())


def load_tokenizer(model: ModelFiles) -> Tokenizer:
    """The tokenizer in a model's files. Raises InvalidConfig when it is missing or of a kind that is not supported."""
    if model.format is FileFormat.GGUF:
        return Tokenizer(*read_gguf_tokenizer(model.path))
    return Tokenizer(*read_hf_tokenizer(model.path))
