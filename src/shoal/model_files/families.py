"""What sets each model family apart from Llama: the whole list. Adding one that is made of known parts is one entry here.

docs/models.md walks through it. Knows names and switches; reads no file and computes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.errors import InvalidConfig
from shoal.model_files.parts import Part


class Windows(StrEnum):
    """Which layers of a family have a sliding window, where the file does not list them."""

    NONE = "none"
    ALL = "all"  # Mistral
    OPTIONAL = "optional"  # Qwen: only with `use_sliding_window`, from `max_window_layers` on
    PATTERN = "pattern"  # Gemma: all but every n-th layer


class Activation(StrEnum):
    """What is applied to the gate before it multiplies `up`."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"  # the tanh form of GELU


@dataclass(frozen=True, slots=True)
class Family:
    """A decoder as its difference from Llama's; the defaults are Llama."""

    hf_class: str  # transformers' class, as a folder's config.json names it
    gguf: str | None = None  # general.architecture of GGUF files; None: such files are not read
    title: str = ""  # for people
    qkv_bias: bool = False
    qk_norm: bool = False  # an RMS norm over each head of q and k, before the rotary embedding
    branch_norms: bool = False  # an RMS norm behind attention and behind the MLP too, before each residual
    activation: Activation = Activation.SILU
    scales_embedding: bool = False  # by √hidden_size
    has_query_scalar: bool = False  # scores are scaled by query_pre_attn_scalar^−½ instead of head_dim^−½
    has_softcaps: bool = False  # cap · tanh(x / cap) on scores and logits, where the file gives a cap
    softcaps: tuple[float | None, float | None] = (None, None)  # of scores and logits, where the file does not say
    norm_offset: float = 0.0  # safetensors hold w and mean offset + w (GGUF files hold the sum)
    windows: Windows = Windows.NONE
    window_pattern: int = 1  # PATTERN: every so many-th layer sees everything
    local_theta: float | None = None  # window layers turn by this rotary base of their own
    theta: float = 10_000.0  # where the file does not say
    is_tied: bool = False  # where the file does not say
    has_mrope: bool = False  # image tokens turn by time, height and width (M-RoPE, interleaved); text turns as usual
    hf_defaults: Mapping[str, object] = field(default_factory=dict)  # fields that config.json may leave out
    hf_names: Mapping[Part, str] = field(default_factory=dict)  # of tensors, where they differ from Llama's


_GEMMA_NORMS = {
    Part.POST_NORM: "model.layers.{layer}.pre_feedforward_layernorm.weight",
    Part.ATTENTION_NORM: "model.layers.{layer}.post_attention_layernorm.weight",
    Part.MLP_NORM: "model.layers.{layer}.post_feedforward_layernorm.weight",
}

FAMILIES: dict[str, Family] = {  # by config.json's model_type
    "llama": Family("LlamaForCausalLM", "llama", "Llama 2, 3.x, SmolLM2"),
    "mistral": Family("MistralForCausalLM", None, "Mistral 7B (GGUF files call it llama)", windows=Windows.ALL),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", "Qwen2, Qwen2.5", qkv_bias=True, windows=Windows.OPTIONAL),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", "Qwen3 (dense)", qk_norm=True, windows=Windows.OPTIONAL),
    "qwen3_vl_text": Family(
        "Qwen3VLForConditionalGeneration",
        None,
        "Qwen3-VL (dense)",
        qk_norm=True,
        theta=500_000.0,
        has_mrope=True,
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        "gemma",
        "Gemma 1",
        activation=Activation.GELU_TANH,
        scales_embedding=True,
        norm_offset=1.0,
        is_tied=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "gemma2",
        "Gemma 2",
        branch_norms=True,
        activation=Activation.GELU_TANH,
        scales_embedding=True,
        has_query_scalar=True,
        has_softcaps=True,
        softcaps=(50.0, 30.0),
        norm_offset=1.0,
        windows=Windows.PATTERN,
        window_pattern=2,
        is_tied=True,
        hf_names=_GEMMA_NORMS,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        "gemma3",
        "Gemma 3 (text)",
        qk_norm=True,
        branch_norms=True,
        activation=Activation.GELU_TANH,
        scales_embedding=True,
        has_query_scalar=True,
        has_softcaps=True,
        norm_offset=1.0,
        windows=Windows.PATTERN,
        window_pattern=6,
        local_theta=10_000.0,
        theta=1_000_000.0,
        hf_defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
        },
        is_tied=True,
        hf_names=_GEMMA_NORMS,
    ),
}
ARCHITECTURES = tuple(FAMILIES)


def family_of(architecture: object) -> tuple[str, Family]:
    """The family that config.json's model_type names, and its name. Raises InvalidConfig that lists the supported ones."""
    if isinstance(architecture, str) and architecture in FAMILIES:
        return architecture, FAMILIES[architecture]
    raise InvalidConfig(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")


def family_of_gguf(architecture: str | None) -> tuple[str, Family]:
    """The family that a GGUF file's general.architecture names. Raises InvalidConfig that lists the supported ones."""
    known = {family.gguf: (name, family) for name, family in FAMILIES.items() if family.gguf is not None}
    if architecture in known:
        return known[architecture]
    raise InvalidConfig(f"architecture {architecture!r} is not supported; supported: {', '.join(known)}")
