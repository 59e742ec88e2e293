"""Which tensors a decoder has, what each file format calls them, and where they lie. Reads no data."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shoal.errors import InvalidConfig
from shoal.model_files.config import DecoderConfig
from shoal.model_files.families import FAMILIES
from shoal.model_files.parts import Part


class FileFormat(StrEnum):
    """How a model is stored."""

    GGUF = "gguf"
    HF = "hf"  # a Hugging Face folder: config.json and safetensors


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor's bytes lie and how they are encoded. Shapes are row-major, as torch writes them."""

    name: str  # the file's own name for it
    shape: tuple[int, ...]
    encoding: str  # a GGML type ("Q4_1", "F32", …) or a safetensors dtype ("BF16", …)
    path: Path
    offset: int  # bytes from the start of the file
    num_bytes: int


_MODEL_PARTS = (Part.EMBEDDING, Part.FINAL_NORM, Part.HEAD)
_NAMES: dict[FileFormat, dict[Part, str]] = {
    FileFormat.GGUF: {
        Part.EMBEDDING: "token_embd.weight",
        Part.FINAL_NORM: "output_norm.weight",
        Part.HEAD: "output.weight",
        Part.INPUT_NORM: "blk.{layer}.attn_norm.weight",
        Part.Q: "blk.{layer}.attn_q.weight",
        Part.K: "blk.{layer}.attn_k.weight",
        Part.V: "blk.{layer}.attn_v.weight",
        Part.Q_BIAS: "blk.{layer}.attn_q.bias",
        Part.K_BIAS: "blk.{layer}.attn_k.bias",
        Part.V_BIAS: "blk.{layer}.attn_v.bias",
        Part.Q_NORM: "blk.{layer}.attn_q_norm.weight",
        Part.K_NORM: "blk.{layer}.attn_k_norm.weight",
        Part.OUTPUT: "blk.{layer}.attn_output.weight",
        Part.ATTENTION_NORM: "blk.{layer}.post_attention_norm.weight",
        Part.MLP_NORM: "blk.{layer}.post_ffw_norm.weight",
        Part.POST_NORM: "blk.{layer}.ffn_norm.weight",
        Part.GATE: "blk.{layer}.ffn_gate.weight",
        Part.UP: "blk.{layer}.ffn_up.weight",
        Part.DOWN: "blk.{layer}.ffn_down.weight",
    },
    FileFormat.HF: {
        Part.EMBEDDING: "model.embed_tokens.weight",
        Part.FINAL_NORM: "model.norm.weight",
        Part.HEAD: "lm_head.weight",
        Part.INPUT_NORM: "model.layers.{layer}.input_layernorm.weight",
        Part.Q: "model.layers.{layer}.self_attn.q_proj.weight",
        Part.K: "model.layers.{layer}.self_attn.k_proj.weight",
        Part.V: "model.layers.{layer}.self_attn.v_proj.weight",
        Part.Q_BIAS: "model.layers.{layer}.self_attn.q_proj.bias",
        Part.K_BIAS: "model.layers.{layer}.self_attn.k_proj.bias",
        Part.V_BIAS: "model.layers.{layer}.self_attn.v_proj.bias",
        Part.Q_NORM: "model.layers.{layer}.self_attn.q_norm.weight",
        Part.K_NORM: "model.layers.{layer}.self_attn.k_norm.weight",
        Part.OUTPUT: "model.layers.{layer}.self_attn.o_proj.weight",
        Part.POST_NORM: "model.layers.{layer}.post_attention_layernorm.weight",
        Part.GATE: "model.layers.{layer}.mlp.gate_proj.weight",
        Part.UP: "model.layers.{layer}.mlp.up_proj.weight",
        Part.DOWN: "model.layers.{layer}.mlp.down_proj.weight",
    },
}


def tensor_name(file_format: FileFormat, part: Part, layer: int | None = None, *, architecture: str = "llama") -> str:
    """What files of this format and family call a part of the model, or of layer `layer`."""
    own = FAMILIES[architecture].hf_names if file_format is FileFormat.HF else {}
    return own.get(part, _NAMES[file_format].get(part, "")).format(layer=layer)


def part_shape(config: DecoderConfig, part: Part) -> tuple[int, ...]:
    """The shape a part must have."""
    s = config.shape
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    match part:
        case Part.EMBEDDING | Part.HEAD:
            return (s.vocab_size, s.hidden_size)
        case Part.FINAL_NORM | Part.INPUT_NORM | Part.POST_NORM | Part.ATTENTION_NORM | Part.MLP_NORM:
            return (s.hidden_size,)
        case Part.Q | Part.K | Part.V:
            return (q if part is Part.Q else kv, s.hidden_size)
        case Part.Q_BIAS | Part.K_BIAS | Part.V_BIAS:
            return (q if part is Part.Q_BIAS else kv,)
        case Part.Q_NORM | Part.K_NORM:
            return (s.head_dim,)
        case Part.OUTPUT:
            return (s.hidden_size, q)
        case Part.GATE | Part.UP:
            return (s.intermediate_size, s.hidden_size)
        case Part.DOWN:
            return (s.hidden_size, s.intermediate_size)


def required_parts(config: DecoderConfig) -> list[tuple[Part, int | None]]:
    """Every (part, layer) the model needs; layer None for the parts outside layers."""
    parts: list[tuple[Part, int | None]] = [(Part.EMBEDDING, None), (Part.FINAL_NORM, None)]
    if not config.tied_embeddings:
        parts.append((Part.HEAD, None))
    absent = set(_MODEL_PARTS)
    if not config.qkv_bias:
        absent |= {Part.Q_BIAS, Part.K_BIAS, Part.V_BIAS}
    if not config.qk_norm:
        absent |= {Part.Q_NORM, Part.K_NORM}
    if not config.branch_norms:
        absent |= {Part.ATTENTION_NORM, Part.MLP_NORM}
    return parts + [(part, layer) for layer in range(config.shape.num_layers) for part in Part if part not in absent]


def check_tensors(where: str, file_format: FileFormat, config: DecoderConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse files that lack a tensor of the model, hold one of another shape, or hold one the decoder would ignore.

    Raises InvalidConfig that names the tensors.
    """
    architecture = config.architecture
    required = {
        tensor_name(file_format, part, layer, architecture=architecture): part_shape(config, part)
        for part, layer in required_parts(config)
    }
    missing = [name for name in required if name not in tensors]
    if missing:
        raise InvalidConfig(
            f"{where} lacks {len(missing)} of {len(required)} tensors, {missing[0]} first; fetch the model's files again"
        )
    for name, shape in required.items():
        if tensors[name].shape != shape:
            raise InvalidConfig(
                f"{where}: tensor {name} has shape {list(tensors[name].shape)}, but the configuration asks for {list(shape)}"
            )
    ignorable = {tensor_name(file_format, Part.HEAD)} if config.tied_embeddings else set()
    ignorable |= {"rope_freqs.weight"}
    extra = sorted(n for n in tensors if n not in required and n not in ignorable and not n.endswith("rotary_emb.inv_freq"))
    if extra:
        raise InvalidConfig(
            f"{where} holds {len(extra)} tensors that a {config.architecture} decoder has no place for, {extra[0]} first; "
            "this variant of the architecture is not supported"
        )
