"""Builds a tokenizer from a GGUF file's metadata: byte-level BPE with the pre-tokenizer the file names, or SentencePiece.

The file gives vocabulary, merges and special tokens, but of the splitting rule only a name. The rules here are those that
llama.cpp and the models' published tokenizer.json follow. transformers' loader of GGUF files knows no `smollm` rule and
falls back to GPT-2's, which cuts a run of white space before a digit differently ("\n\n1" in three, not two).
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shoal.errors import InvalidConfig
from shoal.model_files.gemma_template import GEMMA_TEMPLATE
from shoal.model_files.gguf_file import GgufFile, read_gguf
from shoal.model_files.gguf_sentencepiece import sentencepiece_tokenizer

_log = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Rule:
    split: str | None  # None = GPT-2's own expression
    digits: bool = False  # every digit apart, before anything else
    ignore_merges: bool = False  # a piece that is a token is not taken apart
    nfc: bool = False
    add_bos: bool = False  # unless the file says otherwise


_LLAMA3 = _Rule(_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_RULES = {
    "smollm": _Rule(None, digits=True),
    "gpt-2": _Rule(None),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Rule(_QWEN2_SPLIT, nfc=True),
    "deepseek-r1-qwen": _Rule(_QWEN2_SPLIT, nfc=True),
    "tekken": _Rule(_TEKKEN_SPLIT, ignore_merges=True, add_bos=True),
}


def read_gguf_tokenizer(path: Path) -> tuple[Tokenizer, str | None, str | None, str | None]:
    """Backend, chat template, BOS and EOS token. Raises InvalidConfig that names the unsupported kind."""
    file = read_gguf(path)
    try:
        return _tokenizer(file)
    except InvalidConfig as error:
        raise InvalidConfig(f"{path}: {error}") from error


def _tokenizer(file: GgufFile) -> tuple[Tokenizer, str | None, str | None, str | None]:
    kind = file.text("tokenizer.ggml.model")
    tokens = file.texts("tokenizer.ggml.tokens")
    if kind == "llama":
        tokenizer, adds_bos = sentencepiece_tokenizer(file, tokens), True
    elif kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, tokens)
    else:
        raise InvalidConfig(f"tokenizer {kind!r} is not supported; supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)")
    _add_tokens(tokenizer, file, tokens)
    bos, eos = _named(file, tokens, "bos"), _named(file, tokens, "eos")
    if file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None:
        try:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
            )
        except ValueError as error:
            raise InvalidConfig(f"the BOS token {bos!r:.100} cannot be put before a text: {error}") from error
    return tokenizer, _chat_template(file, tokens), bos, eos


def _chat_template(file: GgufFile, tokens: list[str]) -> str | None:
    """The file's, or Gemma's turns where a file of that family has their tokens and no template (a model before its tuning)."""
    given = file.text("tokenizer.chat_template")
    if given is not None or not {"<start_of_turn>", "<end_of_turn>"} <= set(tokens):
        return given
    _log.info("%s has no chat template; Gemma's turns are used", file.path)
    return GEMMA_TEMPLATE


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Backend, and whether it puts BOS before a text unless the file says otherwise."""
    pre = file.text("tokenizer.ggml.pre") or "gpt-2"
    if pre not in _RULES:
        raise InvalidConfig(f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(_RULES)}")
    rule = _RULES[pre]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in file.texts("tokenizer.ggml.merges"))]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    except Exception as error:  # the library raises this very class
        raise InvalidConfig(f"vocabulary and merges do not fit together: {error}") from error
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _pre_tokenizer(rule: _Rule) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.split is None))
    return pre_tokenizers.Sequence(steps)


def _add_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    """Control tokens are special, user-defined ones are not; both are found whole in a text."""
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise InvalidConfig("tokenizer.ggml.token_type does not have one entry per token")
    control = [AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(control)
    user_defined = [AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens(user_defined)


def _named(file: GgufFile, tokens: list[str], name: str) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    index = file.integer(key)
    if not 0 <= index < len(tokens):
        raise InvalidConfig(f"{key} {index} is not in the vocabulary of {len(tokens)} tokens")
    return tokens[index]
