"""Reads a GGUF file's metadata into a DecoderConfig. Of tensors it reads only the rotary factors (Llama 3.1)."""

import numpy as np

from shoal.errors import InvalidConfig
from shoal.model_files.config import ARCHITECTURES, DecoderConfig, RopeConfig, RopeKind
from shoal.model_files.gguf_file import GgufFile
from shoal.model_files.tensors import FileFormat, Part, TensorInfo, tensor_name
from shoal.types import ModelShape

_MAX_FACTOR_BYTES = 1 << 16
_SUPPORTED = ("llama", "qwen2", "qwen3")  # GGUF stores Mistral and SmolLM2 as llama


def read_gguf_config(file: GgufFile) -> DecoderConfig:
    """Raises InvalidConfig that names the file and the key, or the unsupported architecture."""
    try:
        return _decoder_config(file)
    except InvalidConfig as error:
        raise InvalidConfig(f"{file.path}: {error}") from error


def _decoder_config(file: GgufFile) -> DecoderConfig:
    architecture = file.text("general.architecture")
    if architecture not in _SUPPORTED or architecture is None:
        raise InvalidConfig(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if file.integer(f"{architecture}.expert_count", 0):
        raise InvalidConfig("mixture-of-experts models are not supported")
    if file.metadata.get(f"{architecture}.attention.sliding_window"):
        raise InvalidConfig("sliding windows in a GGUF file are not supported; use the model's safetensors")
    key = f"{architecture}.attention"
    hidden_size, num_heads = file.integer(f"{architecture}.embedding_length"), file.integer(f"{key}.head_count")
    head_dim = file.integer(f"{key}.key_length", hidden_size // max(1, num_heads))
    if file.integer(f"{key}.value_length", head_dim) != head_dim:
        raise InvalidConfig("keys and values of different sizes are not supported")
    if file.integer(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise InvalidConfig("a rotary embedding over part of the head is not supported")
    embedding = file.tensors.get(tensor_name(FileFormat.GGUF, Part.EMBEDDING))
    if embedding is None:
        raise InvalidConfig("the token embedding is absent")
    shape = ModelShape(
        num_layers=file.integer(f"{architecture}.block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=file.integer(f"{key}.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=file.integer(f"{architecture}.feed_forward_length"),
        vocab_size=embedding.shape[0],
        max_context=file.integer(f"{architecture}.context_length"),
    )
    ends = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    bos = "tokenizer.ggml.bos_token_id"
    return DecoderConfig(
        shape=shape,
        architecture=architecture,
        rms_eps=_short(file.number(f"{key}.layer_norm_rms_epsilon")),
        rope=_rope(file, architecture),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tied_embeddings=tensor_name(FileFormat.GGUF, Part.HEAD) not in file.tensors,
        bos_token_id=file.integer(bos) if bos in file.metadata else None,
        eos_token_ids=tuple(dict.fromkeys(file.integer(end) for end in ends if end in file.metadata)),
    )


def _rope(file: GgufFile, architecture: str) -> RopeConfig:
    theta = _short(file.number(f"{architecture}.rope.freq_base", 10_000.0))
    scaling = file.text(f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise InvalidConfig(f"rope scaling {scaling!r} is not supported; supported: none, and per-pair factors")
    if file.number(f"{architecture}.rope.scale_linear", 1.0) != 1.0:  # how files of 2023 said it
        raise InvalidConfig("linear rope scaling is not supported")
    factors = file.tensors.get("rope_freqs.weight")
    return RopeConfig(theta) if factors is None else RopeConfig(theta, RopeKind.FACTORS, factors=_read_floats(factors))


def _read_floats(info: TensorInfo) -> tuple[float, ...]:
    if info.encoding != "F32" or info.num_bytes > _MAX_FACTOR_BYTES:
        raise InvalidConfig(f"{info.name} should be one F32 per rotary pair, not {list(info.shape)} as {info.encoding}")
    values = np.fromfile(info.path, dtype="<f4", count=info.num_bytes // 4, offset=info.offset)
    return tuple(_short(float(value)) for value in values)


def _short(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    with np.errstate(over="ignore"):  # too large a number becomes inf, which DecoderConfig refuses
        return float(str(np.float32(value)))
