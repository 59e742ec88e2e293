"""SentencePiece tokenizers from GGUF files on a vocabulary small enough to follow by hand, and models that come in pieces."""

import hashlib
from pathlib import Path

import gguf
import pytest

from shoal.errors import InvalidConfig
from shoal.model_files import Tokenizer
from shoal.model_files.cache import join_files
from shoal.model_files.gguf_tokenizer import read_gguf_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL = {"<unk>": UNKNOWN, "<bos>": CONTROL, "<eos>": CONTROL, "<start_of_turn>": CONTROL, "<end_of_turn>": CONTROL}
PIECES = ["▁", "a", "b", "c", "d", "bc", "ab", "abc", "▁a", "cd"]  # best first from "bc" on


def write(path: Path, *, scores: int = 0, **flags: bool) -> Path:
    """A file that is a tokenizer and nothing else; `scores` more or fewer scores than tokens."""
    tokens = [*SPECIAL, "  ", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [*SPECIAL.values(), USER_DEFINED, *[BYTE] * 256, *[NORMAL] * len(PIECES)]
    ranks = [-1000.0] * (len(tokens) - len(PIECES)) + [-float(rank) for rank in range(len(PIECES))]
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(ranks[: len(ranks) + scores])
    for name, index in (("unknown", 0), ("bos", 1), ("eos", 2)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.encode(text)]


def test_neighbours_join_by_the_score_of_what_they_make(tmp_path: Path) -> None:
    own = Tokenizer(*read_gguf_tokenizer(write(tmp_path / "own.gguf", add_space_prefix=False)))
    assert pieces(own, "abcd") == ["<bos>", "abc", "d"]  # "bc" first, then "abc"; "cd" comes too late
    assert pieces(own, "acd a") == ["<bos>", "a", "cd", "▁a"]
    assert pieces(own, "a  a") == ["<bos>", "a", "  ", "a"]  # written-out tokens are found before any piece
    assert pieces(own, "é<end_of_turn>") == ["<bos>", "<0xC3>", "<0xA9>", "<end_of_turn>"]
    for text in ("abcd é", " a  b", "d🐟", ""):
        assert own.decode(own.encode(text)) == text
        assert b"".join(own.token_bytes(token_id) for token_id in own.encode(text)[1:]) == text.encode()
    assert own.chat_template is not None and "<start_of_turn>" in own.chat_template  # Gemma's, where the file holds none


def test_a_space_before_the_text_where_the_file_says_nothing(tmp_path: Path) -> None:
    own = Tokenizer(*read_gguf_tokenizer(write(tmp_path / "own.gguf", add_bos_token=False)))
    assert pieces(own, "a bc") == ["▁a", "▁", "bc"]
    assert own.decode(own.encode("a bc")) == "a bc"


def test_scores_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="scores does not have one entry per token"):
        read_gguf_tokenizer(write(tmp_path / "own.gguf", scores=-1))


def test_pieces_are_joined_once_and_checked(tmp_path: Path) -> None:
    halves = [tmp_path / "one", tmp_path / "two"]
    for half, data in zip(halves, (b"shal", b"low"), strict=True):
        half.write_bytes(data)
    digest, target = hashlib.sha256(b"shallow").hexdigest(), tmp_path / "models" / "whole.gguf"
    with pytest.raises(InvalidConfig, match="another checksum"):
        join_files(halves[::-1], target, digest)
    assert [path.suffix for path in target.parent.iterdir()] == [".lock"]
    assert join_files(halves, target, digest).read_bytes() == b"shallow"
    halves[0].unlink()
    assert join_files(halves, target, digest) == target  # what is there is not made again
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match="set SHOAL_CACHE_DIR"):
        join_files(halves, tmp_path / "file" / "whole.gguf", digest)
