"""Reads a Hugging Face config.json (of transformers 4 or 5) into a DecoderConfig. Reads no weights.

Anything that would change the arithmetic and is not known here is refused by name rather than ignored.
"""

import math
from pathlib import Path

from shoal.errors import InvalidConfig
from shoal.model_files.config import MAX_LAYERS, DecoderConfig, window_pattern
from shoal.model_files.families import Activation, Family, Windows, family_of
from shoal.model_files.hf_rope import read_mrope_section, read_ropes
from shoal.model_files.json_fields import Json, flag, ids, integer, number, object_of
from shoal.model_files.safetensors_files import read_json
from shoal.types import ModelShape

TEXT_PARTS = {"gemma3": "gemma3_text", "qwen3_vl": "qwen3_vl_text"}  # by the whole model's model_type
_DEFAULT_WINDOW = 4096  # what transformers takes where the field is absent; null means none
_MAX_WORDS = 1000  # of a value that is quoted
_ACTIVATIONS: dict[Activation, tuple[object, ...]] = {
    Activation.SILU: ("silu", None),
    Activation.GELU_TANH: ("gelu_pytorch_tanh", None),
}


def read_hf_config(folder: Path) -> DecoderConfig:
    """Raises InvalidConfig that names the file and the field, or the unsupported architecture."""
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    try:
        return _decoder_config(config, generation)
    except InvalidConfig as error:
        raise InvalidConfig(f"{folder / 'config.json'}: {str(error)[:_MAX_WORDS]}") from error


def _decoder_config(config: Json, generation: Json) -> DecoderConfig:
    config = text_part(config)
    architecture, family = family_of(config.get("model_type"))
    config = {**family.hf_defaults, **config}
    _refuse(architecture, family, config)
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    num_layers, max_context = integer(config, "num_hidden_layers"), integer(config, "max_position_embeddings")
    if config.get("head_dim") is None and hidden_size % max(1, num_heads):
        raise InvalidConfig(f"hidden_size {hidden_size} cannot be divided among {num_heads} heads, and head_dim is absent")
    shape = ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_dim=integer(config, "head_dim", hidden_size // max(1, num_heads)),
        intermediate_size=integer(config, "intermediate_size"),
        vocab_size=integer(config, "vocab_size"),
        max_context=max_context,
        windows=_windows(family, config, num_layers),
    )
    eos = ids(config, "eos_token_id") + ids(generation, "eos_token_id")
    bos = ids(config, "bos_token_id")
    rope, local_rope = read_ropes(config, family, max_context)
    caps = _softcaps(config, family)
    return DecoderConfig(
        shape=shape,
        architecture=architecture,
        rms_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied_embeddings=flag(config, "tie_word_embeddings", family.is_tied),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        activation=family.activation,
        branch_norms=family.branch_norms,
        embedding_scale=math.sqrt(max(0, hidden_size)) if family.scales_embedding else 1.0,
        score_scale=_score_scale(config, family),
        local_rope=local_rope,
        attention_softcap=caps[0],
        logit_softcap=caps[1],
        mrope_section=read_mrope_section(config) if family.has_mrope else None,
    )


def text_part(config: Json) -> Json:
    """The decoder's fields of a model that sees images too (Gemma 3 from 4B on, Qwen3-VL)."""
    text_type = TEXT_PARTS.get(str(config.get("model_type")))
    if text_type is None:
        return config
    outer = {name: config[name] for name in ("eos_token_id", "bos_token_id", "quantization_config") if name in config}
    head = {"tie_word_embeddings": config.get("tie_word_embeddings")} if text_type == "qwen3_vl_text" else {}
    return {**outer, **object_of(config, "text_config"), **head, "model_type": text_type}


def _refuse(architecture: str, family: Family, config: Json) -> None:
    """Raises InvalidConfig that names a field whose value would change the arithmetic."""
    accepted: dict[str, tuple[object, ...]] = {
        "quantization_config": (None,),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "rope_interleaved": (False, None),
        "use_bidirectional_attention": (False, None),
    }
    if architecture == "qwen2":
        del accepted["attention_bias"]  # Qwen2 has its q, k and v biases whatever this says
    for name, values in accepted.items():
        if config.get(name) not in values:
            raise InvalidConfig(f"{name} {config[name]!r} is not supported")
    name = "hidden_activation" if config.get("hidden_activation") is not None else "hidden_act"
    values = _ACTIVATIONS[family.activation]
    if name == "hidden_act" and family.activation is Activation.GELU_TANH:
        values = (*values, "gelu")  # what the first Gemma files call it, and mean the tanh form
    if config.get(name) not in values:
        raise InvalidConfig(f"{name} {config[name]!r} is not supported")


def _score_scale(config: Json, family: Family) -> float | None:
    if not family.has_query_scalar:
        return None
    scalar = number(config, "query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise InvalidConfig(f"query_pre_attn_scalar {scalar} must be greater than 0")
    return float(scalar**-0.5)


def _softcaps(config: Json, family: Family) -> tuple[float | None, float | None]:
    """Of scores and of logits; null in the file means none."""
    if not family.has_softcaps:
        return None, None
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    given = {**dict(zip(names, family.softcaps, strict=True)), **config}
    scores, logits = (None if given[name] is None else number(given, name) for name in names)
    return scores, logits


def _windows(family: Family, config: Json, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, or () when every layer sees everything."""
    given: Json = {"sliding_window": _DEFAULT_WINDOW, **config}
    if family.windows is Windows.NONE or given["sliding_window"] is None:
        return ()
    if num_layers > MAX_LAYERS or (family.windows is Windows.OPTIONAL and not flag(config, "use_sliding_window")):
        return ()  # DecoderConfig refuses so many layers; nothing of that size is made before it does
    window = integer(given, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        return _usual_windows(family, config, num_layers, window)
    if not isinstance(kinds, list) or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise InvalidConfig(f"layer_types {kinds!r} are not supported; supported: full_attention, sliding_attention")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _usual_windows(family: Family, config: Json, num_layers: int, window: int) -> tuple[int | None, ...]:
    """Where the file does not list them layer by layer."""
    if family.windows is Windows.PATTERN:
        pattern = integer(config, "sliding_window_pattern", family.window_pattern)
        return window_pattern(num_layers, window, pattern)
    first = 0 if family.windows is Windows.ALL else integer(config, "max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(num_layers)) if first < num_layers else ()
