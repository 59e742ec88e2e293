"""Writes a small random-weight model as a Hugging Face folder, for tests, load tests and benchmarks. No torch, no network.

The weights are scaled so that attention, norms, biases and the LM head all matter and greedy choices are clear.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.errors import InvalidConfig
from shoal.model_files.config import DecoderConfig, window_pattern
from shoal.model_files.families import Activation, Family, Windows, family_of
from shoal.model_files.hf_config import TEXT_PARTS, read_hf_config
from shoal.model_files.parts import NORMS, Part
from shoal.model_files.random_tokenizer import BOS_ID, EOS_ID, MIN_VOCAB_SIZE, write_random_tokenizer
from shoal.model_files.random_vision import random_vision, vision_values
from shoal.model_files.tensors import FileFormat, part_shape, required_parts, tensor_name
from shoal.types import DType

_NO_WINDOW = 4096  # transformers wants a number, though no layer uses it
_SOFTCAPS = (2.0, 12.0)  # of scores and logits
_LOGIT_SPREAD = 3.0  # standard deviation of the logits


def write_random_model(
    folder: Path | str,
    *,
    architecture: str = "llama",
    num_layers: int = 4,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 128,
    vocab_size: int = 512,
    max_context: int = 512,
    sliding_window: int | None = None,
    num_global_layers: int = 0,
    rope_theta: float = 10_000.0,
    llama3_rope: bool = False,
    tied_embeddings: bool = False,
    dtype: DType = DType.FLOAT32,
    num_shards: int = 1,
    seed: int = 0,
) -> Path:
    """Write config.json, safetensors, tokenizer.json and tokenizer_config.json; returns the folder.

    `sliding_window` applies to all layers of mistral, to layers num_global_layers … L−1 of qwen2 and qwen3, to all but every
    second (gemma2) or sixth (gemma3_text) layer of Gemma. `llama3_rope` adds Llama 3.1's rope scaling. `gemma3` and `qwen3_vl`
    get a vision tower too. Equal arguments write equal bytes. Raises InvalidConfig for a combination that cannot be.
    """
    folder, whole = Path(folder), architecture
    architecture, family = family_of(TEXT_PARTS.get(whole, whole))
    if family.windows is Windows.NONE and sliding_window is not None:
        raise InvalidConfig(f"{architecture} has no sliding window; use mistral, qwen2, qwen3, gemma2 or gemma3_text")
    if vocab_size < MIN_VOCAB_SIZE + (3 if whole in TEXT_PARTS else 0):
        raise InvalidConfig(f"vocab_size must be at least {MIN_VOCAB_SIZE}: every byte and the special tokens")
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": rope_theta}
    if llama3_rope:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": max(1, max_context // 4)}
    config: dict[str, object] = {
        "architectures": [family.hf_class],
        "model_type": architecture,
        "hidden_act": "silu" if family.activation is Activation.SILU else "gelu_pytorch_tanh",
        "hidden_activation": None if family.activation is Activation.SILU else "gelu_pytorch_tanh",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
        "tie_word_embeddings": tied_embeddings,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": str(dtype),
    }
    config |= _of_family(family, head_dim, rope) | _windows(family, num_layers, sliding_window, num_global_layers)
    vision = random_vision(whole, hidden_size) if whole in TEXT_PARTS else None
    folder.mkdir(parents=True, exist_ok=True)
    config = config if vision is None else vision.config(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if vision is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(vision.processor, indent=2))
    _write_weights(folder, read_hf_config(folder), dtype, num_shards, seed, {} if vision is None else vision.shapes)
    write_random_tokenizer(folder, vocab_size, () if vision is None else vision.tokens)
    return folder


def _of_family(family: Family, head_dim: int, rope: dict[str, object]) -> dict[str, object]:
    """What Gemma's files hold beside the usual: small caps, so that they matter, and a query scalar that is not head_dim."""
    found: dict[str, object] = {}
    if family.has_query_scalar:
        found["query_pre_attn_scalar"] = 2 * head_dim
    if family.has_softcaps:
        scores, logits = (None if usual is None else cap for usual, cap in zip(family.softcaps, _SOFTCAPS, strict=True))
        found |= {"attn_logit_softcapping": scores, "final_logit_softcapping": logits}
    if family.has_mrope:
        pairs = head_dim // 2
        found["rope_parameters"] = {
            **rope,
            "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
        }
    if family.local_theta is not None:
        local = {"rope_type": "default", "rope_theta": 100.0}
        found["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return found


def _windows(family: Family, num_layers: int, window: int | None, num_global_layers: int) -> dict[str, object]:
    match family.windows:
        case Windows.ALL:
            return {"sliding_window": window}
        case Windows.PATTERN:
            of_layer = window_pattern(num_layers, window, family.window_pattern) if window else ()
            kinds = ["sliding_attention" if has else "full_attention" for has in of_layer] or ["full_attention"] * num_layers
            return {"sliding_window": window or _NO_WINDOW, "layer_types": kinds}
        case Windows.OPTIONAL if window is not None:
            kinds = ["full_attention" if layer < num_global_layers else "sliding_attention" for layer in range(num_layers)]
            found: dict[str, object] = {"use_sliding_window": True, "sliding_window": window}
            return found | {"max_window_layers": num_global_layers, "layer_types": kinds}
    return {}


def _write_weights(
    folder: Path,
    config: DecoderConfig,
    dtype: DType,
    num_shards: int,
    seed: int,
    vision: Mapping[str, tuple[int, ...]],
) -> None:
    parts = required_parts(config)
    if not 1 <= num_shards <= len(parts):
        raise InvalidConfig(f"num_shards must lie in 1…{len(parts)}, not {num_shards}")
    rng = np.random.default_rng(seed)
    per_shard = math.ceil(len(parts) / num_shards)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for shard in range(num_shards):
        name = "model.safetensors" if num_shards == 1 else f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        held = parts[shard * per_shard : (shard + 1) * per_shard]
        names = [tensor_name(FileFormat.HF, part, layer, architecture=config.architecture) for part, layer in held]
        if vision:  # as transformers 5 calls them
            names = [name.replace("model.", "model.language_model.", 1) for name in names]
        shapes = {name: part_shape(config, part) for name, (part, _) in zip(names, held, strict=True)}
        values: Iterator[npt.NDArray[np.float32]] = (_values(rng, config, part) for part, _ in held)
        if shard == num_shards - 1:
            shapes |= vision
            values = chain(values, (vision_values(rng, name, shape) for name, shape in vision.items()))
        total_bytes += write_safetensors(folder / name, shapes, values, dtype)
        weight_map |= dict.fromkeys(shapes, name)
    if num_shards > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _values(rng: np.random.Generator, config: DecoderConfig, part: Part) -> npt.NDArray[np.float32]:
    shape = part_shape(config, part)
    noise = rng.standard_normal(shape, dtype=np.float32)
    match part:
        case Part.EMBEDDING | Part.HEAD:
            scaled = noise * (_LOGIT_SPREAD / math.sqrt(shape[-1]))  # in Gemma's the residual stream starts √h times as large
        case _ if part in NORMS:
            scaled = 1 - family_of(config.architecture)[1].norm_offset + 0.1 * noise
        case Part.Q_BIAS | Part.K_BIAS | Part.V_BIAS:
            scaled = 0.5 * noise
        case _:
            scaled = noise / math.sqrt(shape[-1])
    return scaled.astype(np.float32)


def write_safetensors(
    path: Path, shapes: dict[str, tuple[int, ...]], values: Iterator[npt.NDArray[np.float32]], dtype: DType
) -> int:
    """Write tensors one at a time in the order of `shapes`; returns the bytes of data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        stop = offset + math.prod(shape) * dtype.num_bytes
        encoding = {DType.FLOAT32: "F32", DType.BFLOAT16: "BF16"}[dtype]
        header[name] = {"dtype": encoding, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in values:
            file.write(array.astype("<f4").tobytes() if dtype is DType.FLOAT32 else _bfloat16(array))
    return offset


def _bfloat16(array: npt.NDArray[np.float32]) -> bytes:
    """Round to nearest, ties to even: the upper half of each float32."""
    bits = array.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return rounded.astype("<u2").tobytes()
