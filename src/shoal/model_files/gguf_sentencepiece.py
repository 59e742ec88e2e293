"""Builds a SentencePiece tokenizer (BPE by scores, unknown characters as bytes) from a GGUF file's metadata: Gemma, Llama 2.

Such a file lists pieces with scores and no merges. SentencePiece joins the two neighbours that make the piece of the highest
score; the same follows from merges listed in the order of the pieces that they make.
"""

from tokenizers import Tokenizer, decoders, models, normalizers

from shoal.errors import InvalidConfig
from shoal.model_files.gguf_file import GgufFile

_NORMAL = 1  # llama.cpp's token type of ordinary pieces; bytes, control and user-defined tokens never take part in a merge
_SPACE = "▁"
_MAX_PIECE = 256  # characters of a piece that is looked for by its halves


def sentencepiece_tokenizer(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """The backend without its added tokens. Raises InvalidConfig when scores or types are missing or do not fit."""
    scores, types = (_column(file, name, len(tokens)) for name in ("scores", "token_type"))
    unknown = file.integer("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise InvalidConfig(f"tokenizer.ggml.unknown_token_id {unknown} is not in the vocabulary of {len(tokens)} tokens")
    pieces = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges(pieces),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best pieces first."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=pieces.__getitem__, reverse=True):
        for cut in range(1, min(len(piece), _MAX_PIECE)):
            left = piece[:cut]
            if left in pieces and (right := piece[cut:]) in pieces:
                merges.append((left, right))
    return merges


def _column(file: GgufFile, name: str, length: int) -> list[float]:
    values = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or len(values) != length:
        raise InvalidConfig(f"tokenizer.ggml.{name} does not have one entry per token")
    return [float(value) for value in values if isinstance(value, int | float)]
