"""Reads a catalogue entry, or a Hugging Face config.json, into a ModelSpec. Knows field names; opens no weights.

More architectures are planned for here than are served: a plan only needs counts.
"""

from collections.abc import Mapping, Sequence

from shoal.errors import InvalidConfig
from shoal.simulator.model_spec import Experts, LatentAttention, ModelSpec
from shoal.types import ModelShape

Json = Mapping[str, object]


def model_from_entry(entry: Json) -> ModelSpec:
    """An entry of catalogue/models.json, or of a user's YAML. Raises InvalidConfig that names the entry and the field."""
    name = str(entry.get("name", "unnamed model"))
    layers = integer(entry, "layers", name)
    mla_entry, moe = entry.get("mla"), entry.get("moe")
    mla = experts = None
    if isinstance(mla_entry, Mapping):
        mla = LatentAttention(
            integer(mla_entry, "q_lora_rank", name, 0),
            integer(mla_entry, "kv_lora_rank", name),
            integer(mla_entry, "qk_nope_head_dim", name),
            integer(mla_entry, "qk_rope_head_dim", name),
            integer(mla_entry, "v_head_dim", name),
        )
    if isinstance(moe, Mapping):
        experts = Experts(
            integer(moe, "n_routed_experts", name),
            integer(moe, "experts_per_token", name),
            integer(moe, "n_shared", name, 0),
            integer(moe, "moe_intermediate", name),
            integer(moe, "first_dense_layers", name, 0),
        )
    window, every = entry.get("sliding_window"), entry.get("global_every")
    windows: tuple[int | None, ...] = ()
    if window is not None:
        size, period = integer(entry, "sliding_window", name), integer(entry, "global_every", name) if every else 0
        windows = tuple(None if period and (layer + 1) % period == 0 else size for layer in range(layers))
    shape = _shape(entry, name, layers, windows, mla)
    return ModelSpec(
        name=name,
        shape=shape,
        source=str(entry.get("source", "given by the user")),
        mla=mla,
        experts=experts,
        num_mlp_matrices=integer(entry, "mlp_matrices", name, 3),
        tied_embeddings=entry.get("tied_embeddings") is True,
    )


def model_from_hf_config(config: Json, name: str) -> ModelSpec:
    """A config.json. Layer kinds come from `layer_types`, else from `sliding_window_pattern`; text models inside too."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    layers = integer(config, "num_hidden_layers", name)
    heads, hidden = integer(config, "num_attention_heads", name), integer(config, "hidden_size", name)
    entry: dict[str, object] = {
        "name": name,
        "source": f"{name} (config.json)",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "ffn": config.get("intermediate_size"),
        "vocab": config.get("vocab_size"),
        "max_ctx": config.get("max_position_embeddings"),
        "tied_embeddings": config.get("tie_word_embeddings"),
    }
    if config.get("kv_lora_rank"):
        entry["mla"] = {key: config.get(key) or 0 for key in _MLA_FIELDS}
    routed = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts")
    if routed:
        entry["moe"] = {
            "n_routed_experts": routed,
            "experts_per_token": config.get("num_experts_per_tok"),
            "n_shared": config.get("n_shared_experts") or 0,
            "moe_intermediate": config.get("moe_intermediate_size") or config.get("intermediate_size"),
            "first_dense_layers": config.get("first_k_dense_replace") or 0,
        }
    spec = model_from_entry(entry)
    windows = _hf_windows(config, layers, name)
    if not windows:
        return spec
    shape = ModelShape(**{**{f: getattr(spec.shape, f) for f in ModelShape.__dataclass_fields__}, "windows": windows})
    return ModelSpec(**{**{f: getattr(spec, f) for f in ModelSpec.__dataclass_fields__}, "shape": shape})


_MLA_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _hf_windows(config: Json, num_layers: int, name: str) -> tuple[int | None, ...]:
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ()
    window = integer(config, "sliding_window", name)
    kinds = config.get("layer_types")
    if isinstance(kinds, Sequence) and not isinstance(kinds, str):
        if len(kinds) != num_layers:
            raise InvalidConfig(f"{name}: layer_types has {len(kinds)} entries for {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    period = integer(config, "sliding_window_pattern", name, 6 if "gemma3" in str(config.get("model_type")) else 0)
    return tuple(None if period and (layer + 1) % period == 0 else window for layer in range(num_layers))


def _shape(entry: Json, name: str, layers: int, windows: tuple[int | None, ...], mla: LatentAttention | None) -> ModelShape:
    kv_heads, head_dim = (integer(entry, "kv_heads", name), integer(entry, "head_dim", name)) if mla is None else (1, 0)
    if mla is not None:
        if (mla.kv_rank + mla.rope_dim) % 2:
            raise InvalidConfig(f"{name}: kv_lora_rank + qk_rope_head_dim must be even")
        head_dim = (mla.kv_rank + mla.rope_dim) // 2  # so that 2 · kv_heads · head_dim is the latent's size
    return ModelShape(
        num_layers=layers,
        hidden_size=integer(entry, "hidden", name),
        num_heads=integer(entry, "heads", name),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=integer(entry, "ffn", name),
        vocab_size=integer(entry, "vocab", name),
        max_context=integer(entry, "max_ctx", name),
        windows=windows,
    )


def integer(entry: Json, field: str, name: str, default: int | None = None) -> int:
    """A whole number of an entry, at least 1 unless a default says 0 is fine. Raises InvalidConfig."""
    value = entry.get(field, default)
    if value is None:
        value = default
    least = 1 if default is None else min(1, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidConfig(f"{name}: {field} should be a whole number of at least {least}, not {value!r}")
    return value
