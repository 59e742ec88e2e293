"""Reads a GGUF file's metadata into a DecoderConfig. Of tensors it reads only the rotary factors (Llama 3.1)."""

import math

import numpy as np

from shoal.errors import InvalidConfig
from shoal.model_files.config import MAX_LAYERS, DecoderConfig, window_pattern
from shoal.model_files.families import Family, Windows, family_of_gguf
from shoal.model_files.gguf_file import GgufFile
from shoal.model_files.parts import Part
from shoal.model_files.rope import RopeConfig, RopeKind
from shoal.model_files.tensors import FileFormat, TensorInfo, tensor_name
from shoal.types import ModelShape

_MAX_FACTOR_BYTES = 1 << 16
END_OF_TURN = "<end_of_turn>"


def read_gguf_config(file: GgufFile) -> DecoderConfig:
    """Raises InvalidConfig that names the file and the key, or the unsupported architecture."""
    try:
        return _decoder_config(file)
    except InvalidConfig as error:
        raise InvalidConfig(f"{file.path}: {error}") from error


def _decoder_config(file: GgufFile) -> DecoderConfig:
    prefix = file.text("general.architecture")
    architecture, family = family_of_gguf(prefix)
    if file.integer(f"{prefix}.expert_count", 0):
        raise InvalidConfig("mixture-of-experts models are not supported")
    key = f"{prefix}.attention"
    hidden_size, num_heads = file.integer(f"{prefix}.embedding_length"), file.integer(f"{key}.head_count")
    head_dim = file.integer(f"{key}.key_length", hidden_size // max(1, num_heads))
    if file.integer(f"{key}.value_length", head_dim) != head_dim:
        raise InvalidConfig("keys and values of different sizes are not supported")
    if file.integer(f"{prefix}.rope.dimension_count", head_dim) != head_dim:
        raise InvalidConfig("a rotary embedding over part of the head is not supported")
    embedding = file.tensors.get(tensor_name(FileFormat.GGUF, Part.EMBEDDING))
    if embedding is None:
        raise InvalidConfig("the token embedding is absent")
    num_layers = file.integer(f"{prefix}.block_count")
    shape = ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=file.integer(f"{key}.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=file.integer(f"{prefix}.feed_forward_length"),
        vocab_size=embedding.shape[0],
        max_context=file.integer(f"{prefix}.context_length"),
        windows=_windows(file, f"{key}.sliding_window", family, num_layers),
    )
    bos = "tokenizer.ggml.bos_token_id"
    local_theta = file.number(f"{prefix}.rope.freq_base_swa", family.local_theta) if family.local_theta else None
    caps = zip(("attn", "final"), family.softcaps, strict=True)
    scores, logits = (_softcap(file, f"{prefix}.{name}_logit_softcapping", cap, family) for name, cap in caps)
    return DecoderConfig(
        shape=shape,
        architecture=architecture,
        rms_eps=_short(file.number(f"{key}.layer_norm_rms_epsilon")),
        rope=_rope(file, prefix, family),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied_embeddings=tensor_name(FileFormat.GGUF, Part.HEAD) not in file.tensors,
        bos_token_id=file.integer(bos) if bos in file.metadata else None,
        eos_token_ids=_ends(file),
        activation=family.activation,
        branch_norms=family.branch_norms,
        embedding_scale=math.sqrt(max(0, hidden_size)) if family.scales_embedding else 1.0,
        score_scale=_score_scale(file, prefix, num_layers, hidden_size, num_heads) if family.has_query_scalar else None,
        local_rope=None if local_theta is None else RopeConfig(_short(local_theta)),
        attention_softcap=scores,
        logit_softcap=logits,
    )


def _windows(file: GgufFile, key: str, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if not file.metadata.get(key):
        return ()
    if family.windows is not Windows.PATTERN:
        raise InvalidConfig(f"sliding windows in a GGUF file are not supported for {family.gguf}; use the model's safetensors")
    if num_layers > MAX_LAYERS:
        return ()  # DecoderConfig refuses it
    pattern = file.metadata.get(f"{key}_pattern", family.window_pattern)
    if isinstance(pattern, list):  # layer by layer: whether it has the window
        return tuple(file.integer(key) if has_window else None for has_window in pattern)
    return window_pattern(num_layers, file.integer(key), file.integer(f"{key}_pattern", family.window_pattern))


def _softcap(file: GgufFile, key: str, default: float | None, family: Family) -> float | None:
    if not family.has_softcaps or (key not in file.metadata and default is None):
        return None
    return _short(file.number(key, default)) or None


def _score_scale(file: GgufFile, prefix: str | None, num_layers: int, hidden_size: int, num_heads: int) -> float | None:
    """GGUF files do not hold query_pre_attn_scalar: it is head_dim, but for Gemma 2 and 3 of 27B h / heads."""
    is_27b = num_layers == {"gemma2": 46, "gemma3": 62}.get(prefix or "")
    return float((hidden_size / num_heads) ** -0.5) if is_27b else None


def _ends(file: GgufFile) -> tuple[int, ...]:
    """Tokens that end an answer: those the file names, and the end of a turn, which files made of Gemma do not name."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = [file.integer(key) for key in keys if key in file.metadata]
    if keys[1] not in file.metadata:
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and END_OF_TURN in tokens:
            ends.append(tokens.index(END_OF_TURN))
    return tuple(dict.fromkeys(ends))


def _rope(file: GgufFile, prefix: str | None, family: Family) -> RopeConfig:
    theta = _short(file.number(f"{prefix}.rope.freq_base", family.theta))
    scaling = file.text(f"{prefix}.rope.scaling.type")
    if scaling == "linear":
        return RopeConfig(theta, RopeKind.LINEAR, factor=file.number(f"{prefix}.rope.scaling.factor"))
    if scaling not in (None, "none"):
        raise InvalidConfig(f"rope scaling {scaling!r} is not supported; supported: none, linear, and per-pair factors")
    if file.number(f"{prefix}.rope.scale_linear", 1.0) != 1.0:  # how files of 2023 said it
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
