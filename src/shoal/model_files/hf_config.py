"""Reads a Hugging Face config.json (of transformers 4 or 5) into a DecoderConfig. Reads no weights.

Anything that would change the arithmetic and is not known here is refused by name rather than ignored.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from shoal.errors import InvalidConfig
from shoal.model_files.config import ARCHITECTURES, MAX_LAYERS, DecoderConfig, RopeConfig, RopeKind
from shoal.model_files.safetensors_files import read_json
from shoal.types import ModelShape

Json: TypeAlias = Mapping[str, object]

_MAX_NUMBER = 2**31  # no count of a real model is larger
_DEFAULT_WINDOW = 4096  # what transformers takes for Mistral, Qwen2 and Qwen3 where the field is absent; null means none
_MAX_WORDS = 1000  # of a value that is quoted


def read_hf_config(folder: Path) -> DecoderConfig:
    """Raises InvalidConfig that names the file and the field, or the unsupported architecture."""
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    try:
        return _decoder_config(config, generation)
    except InvalidConfig as error:
        raise InvalidConfig(f"{folder / 'config.json'}: {str(error)[:_MAX_WORDS]}") from error


def _decoder_config(config: Json, generation: Json) -> DecoderConfig:
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES or not isinstance(architecture, str):
        raise InvalidConfig(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    refused = {
        "quantization_config": (None,),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "rope_interleaved": (False, None),
    }
    if architecture == "qwen2":
        del refused["attention_bias"]  # Qwen2 has its q, k and v biases whatever this says
    for name, accepted in refused.items():
        if config.get(name) not in accepted:
            raise InvalidConfig(f"{name} {config[name]!r} is not supported")
    hidden_size, num_heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    num_layers, max_context = _integer(config, "num_hidden_layers"), _integer(config, "max_position_embeddings")
    if config.get("head_dim") is None and hidden_size % max(1, num_heads):
        raise InvalidConfig(f"hidden_size {hidden_size} cannot be divided among {num_heads} heads, and head_dim is absent")
    head_dim = _integer(config, "head_dim", hidden_size // max(1, num_heads))
    shape = ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=_integer(config, "intermediate_size"),
        vocab_size=_integer(config, "vocab_size"),
        max_context=max_context,
        windows=_windows(architecture, config, num_layers),
    )
    eos = _ids(config, "eos_token_id") + _ids(generation, "eos_token_id")
    bos = _ids(config, "bos_token_id")
    return DecoderConfig(
        shape=shape,
        architecture=architecture,
        rms_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, max_context),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def _rope(config: Json, max_context: int) -> RopeConfig:
    """transformers 5 keeps everything in rope_parameters; older files have rope_theta beside an optional rope_scaling."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise InvalidConfig("rope_parameters should be an object")
    outer = ("rope_theta", "original_max_position_embeddings")  # may stand beside the object instead of in it
    rope: Json = {name: config.get(name) for name in outer} | dict(given)
    turned = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if turned not in (None, 1, 1.0):
        raise InvalidConfig(f"partial_rotary_factor {turned} is not supported")
    theta = _number(rope, "rope_theta", 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        raise InvalidConfig(f"rope scaling {kind!r} is not supported; supported: default, llama3")
    return RopeConfig(
        theta,
        RopeKind.LLAMA3,
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_context=_integer(rope, "original_max_position_embeddings", max_context),
    )


def _windows(architecture: str, config: Json, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, or () when every layer sees everything."""
    given: Json = {"sliding_window": _DEFAULT_WINDOW, **config}
    if architecture == "llama" or given["sliding_window"] is None:
        return ()
    if num_layers > MAX_LAYERS or (architecture != "mistral" and not _flag(config, "use_sliding_window")):
        return ()  # DecoderConfig refuses so many layers; nothing of that size is made before it does
    window = _integer(given, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = 0 if architecture == "mistral" else _integer(config, "max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers)) if first < num_layers else ()
    if not isinstance(kinds, list) or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise InvalidConfig(f"layer_types {kinds!r} are not supported; supported: full_attention, sliding_attention")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _number(config: Json, name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
        raise InvalidConfig(f"{name} should be a number, not {value!r:.100}")
    try:
        return float(value)
    except OverflowError:
        raise InvalidConfig(f"{name} is an integer of more than 308 digits, which cannot be meant") from None


def _integer(config: Json, name: str, default: int | None = None) -> int:
    value = _number(config, name, default)
    if value != int(value):
        raise InvalidConfig(f"{name} should be a whole number, not {value!r}")
    if abs(value) > _MAX_NUMBER:
        raise InvalidConfig(f"{name} is {value!r}; more than {_MAX_NUMBER} cannot be meant")
    return int(value)


def _flag(config: Json, name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidConfig(f"{name} should be true or false, not {value!r}")
    return value is True


def _ids(config: Json, name: str) -> tuple[int, ...]:
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
        raise InvalidConfig(f"{name} should be a token id or a list of them, not {value!r}")
    return tuple(ids)
