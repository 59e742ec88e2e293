"""Damaged and hostile model files: always refused with words, at the cost of neither memory nor another kind of error."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from shoal.errors import InvalidConfig
from shoal.model_files import RopeConfig, known_models, open_model, write_random_model
from shoal.model_files.gguf_config import read_gguf_config
from shoal.model_files.gguf_file import read_gguf

DEFAULT = known_models()[0]


def test_many_window_layers_are_refused_before_anything_is_made_for_each(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, architecture="mistral", sliding_window=4)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10**7, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    with pytest.raises(InvalidConfig, match="more than 10000 cannot be meant"):
        open_model(str(folder))
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"hidden_size": ' + "9" * 5000 + "}", "{", "\udc80"])
def test_json_that_python_cannot_read_is_refused(tmp_path: Path, text: str) -> None:
    write_random_model(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidConfig, match="is not valid JSON"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    "header",
    [
        '{"a.rotary_emb.inv_freq": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}',
        '{"a.rotary_emb.inv_freq": {"dtype": "F32", "shape": [4], "data_offsets": [1e999, 0]}}',
        '{"a.rotary_emb.inv_freq": {"dtype": "F32", "shape": [-25], "data_offsets": [100, 0]}}',
        '{"a":' * 100_000,
    ],
)
def test_odd_numbers_in_a_safetensors_header_are_refused(tmp_path: Path, header: str) -> None:
    write_random_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(400))
    with pytest.raises(InvalidConfig, match="damaged safetensors header") as caught:
        open_model(str(tmp_path))
    assert len(str(caught.value)) < 500


def test_damage_in_a_safetensors_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    weights = write_random_model(tmp_path, num_layers=1) / "model.safetensors"
    whole = weights.read_bytes()
    num_refused = 0
    for position in range(0, 400):
        weights.write_bytes(whole[:position] + bytes([whole[position] ^ 0x15]) + whole[position + 1 :])
        try:
            open_model(str(tmp_path))
        except InvalidConfig:
            num_refused += 1
    assert num_refused > 350  # a changed digit inside a comment or an offset's leading blank may still be valid


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_cut_safetensors_are_refused(tmp_path: Path, kept: int) -> None:
    weights = write_random_model(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(InvalidConfig, match=r"cut short|damaged"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(("kept", "words"), [(10, "is not a GGUF"), (700_000, "within its header"), (50_000_000, "tensors end")])
def test_a_cut_gguf_is_refused(tmp_path: Path, kept: int, words: str) -> None:
    path = DEFAULT.locate()
    assert path is not None
    with path.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(kept))
    with pytest.raises(InvalidConfig, match=words):
        open_model(str(tmp_path / "cut.gguf"))


def test_damage_in_a_gguf_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(2)
    writer.add_token_list(["a", "bc"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    whole = path.read_bytes()
    with pytest.raises(InvalidConfig, match="architecture 'mamba' is not supported"):
        open_model(str(path))
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        with pytest.raises(InvalidConfig):
            open_model(str(path))


def test_damaged_lengths_in_a_gguf_cost_neither_memory_nor_a_page_of_words(tmp_path: Path) -> None:
    """A length that still lies within the file: of a string over bytes that are no text, of an array over the weights."""

    def key(name: str, kind: int) -> bytes:
        return len(name).to_bytes(8, "little") + name.encode() + kind.to_bytes(4, "little")

    path, filler = tmp_path / "odd.gguf", b"\xff" * 6_000_000
    start = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    text = key("general.architecture", 8) + (5_000_000).to_bytes(8, "little")
    array = key("general.odd", 9) + (0).to_bytes(4, "little") + (5_000_000).to_bytes(8, "little")
    for damaged, words in [(text, "invalid start byte"), (array, "an array of 5000000 items")]:
        path.write_bytes(start + damaged + filler)
        with pytest.raises(InvalidConfig, match=words) as caught:
            open_model(str(path))
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.rope.scale_linear", 4.0, "linear rope scaling is not supported"),
        ("llama.rope.freq_base", 1e300, "must be finite"),
        ("llama.attention.sliding_window", 128, "sliding windows in a GGUF file are not supported for llama"),
        ("llama.block_count", 1 << 62, "more than 10000 cannot be meant"),
    ],
)
def test_gguf_metadata_that_would_change_the_arithmetic_is_refused(key: str, value: float, words: str) -> None:
    path = DEFAULT.locate()
    assert path is not None
    file = read_gguf(path)
    assert read_gguf_config(file).rope == RopeConfig(100_000.0)
    with pytest.raises(InvalidConfig, match=words):
        read_gguf_config(replace(file, metadata={**file.metadata, key: value}))
