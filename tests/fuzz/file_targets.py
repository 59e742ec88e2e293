"""Model files as a stranger might hand them over: headers and configurations, damaged. Reads files in memory-backed folders."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
from PIL import Image

from shoal.engine.vision.pictures import read_picture
from shoal.model_files import write_random_model
from shoal.model_files.gguf_config import read_gguf_config
from shoal.model_files.gguf_file import read_gguf
from shoal.model_files.hf_config import read_hf_config
from shoal.model_files.safetensors_files import read_header
from tests.folders import temporary_folder
from tests.fuzz.draw import Draw
from tests.fuzz.target import Target

_KINDS = ("F32", "BF16", "I8", "F31", 3)


@cache
def _folder() -> Path:
    return write_random_model(temporary_folder(), num_layers=1)


@cache
def _whole(kind: str) -> bytes:
    if kind == "gguf":
        path = _folder() / "small.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(2)
        writer.add_context_length(128)
        writer.add_embedding_length(64)
        writer.add_head_count(4)
        writer.add_feed_forward_length(128)
        writer.add_token_list(["a", "bc"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path.read_bytes()
    return (_folder() / kind).read_bytes()


def _write(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.write_bytes(data)
    return path


def _header(draw: Draw) -> bytes:
    whole = _whole("model.safetensors")
    if draw.chance(50):
        return draw.damaged(whole[:3000], 100)
    entry = {
        "dtype": draw.pick(_KINDS),
        "shape": draw.pick(([4], [2, 2], [-1], [1 << 40, 1 << 40], [1e999], draw.json(3))),
        "data_offsets": draw.pick(([0, 16], [16, 0], [0, 1 << 62], [-16, 0], draw.json(3))),
    }
    text = draw.json_text({"model.norm.weight": entry, draw.text(): draw.pick((entry, draw.json(2)))}).encode(
        "utf-8", "surrogatepass"
    )
    return len(text).to_bytes(8, "little") + text + bytes(draw.below(64))


def call_header(data: bytes) -> None:
    read_header(_write("fuzzed.safetensors", data))


def _gguf(draw: Draw) -> bytes:
    made = bytearray(draw.damaged(_whole("gguf"), 50))
    for _ in range(draw.below(4)):
        at = draw.below(max(1, len(made) - 8))
        made[at : at + 8] = draw.pick(
            (bytes(8), b"\xff" * 8, (1 << 62).to_bytes(8, "little"), (5_000_000).to_bytes(8, "little"), draw.raw(9))
        )
    return bytes(made) + bytes(draw.below(3000))


def call_gguf(data: bytes) -> None:
    read_gguf_config(read_gguf(_write("fuzzed.gguf", data)))


def _config(draw: Draw) -> bytes:
    whole: dict[str, Any] = json.loads(_whole("config.json"))
    for _ in range(draw.below(4)):
        name = draw.pick((*whole, "rope_scaling", "sliding_window", "layer_types", "head_dim", "generation_config"))
        whole[name] = draw.pick((draw.integer(), draw.number(), draw.json(2), {"rope_type": "llama3", "factor": draw.number()}))
    return draw.damaged(draw.json_text(whole).encode("utf-8", "surrogatepass"))


def call_config(data: bytes) -> None:
    folder = _folder() / "fuzzed"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(data)
    read_hf_config(folder)


@cache
def _pictures() -> tuple[bytes, ...]:
    files = [io.BytesIO() for _ in range(4)]
    for file, form in zip(files, ("PNG", "JPEG", "WEBP", "GIF"), strict=True):
        Image.effect_noise((21, 13), 50).save(file, form)
    return tuple(file.getvalue() for file in files)


def _picture(draw: Draw) -> bytes:
    return draw.damaged(draw.pick(_pictures()), 60)


def call_picture(data: bytes) -> None:
    read_picture(data)


TARGETS = (
    Target("picture", 3, _picture, call_picture),
    Target("safetensors", 4, _header, call_header),
    Target("gguf", 3, _gguf, call_gguf),
    Target("config.json", 3, _config, call_config),
)
