"""What a decoder is, in numbers: shape, rotary embedding, norms. Knows no file format and no weights."""

import math
from dataclasses import dataclass
from enum import StrEnum

from shoal.errors import InvalidConfig
from shoal.types import ModelShape

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
MAX_LAYERS = 10_000


class RopeKind(StrEnum):
    """How the inverse frequencies θ^(−2i/d) are adjusted."""

    DEFAULT = "default"  # not at all
    LLAMA3 = "llama3"  # by wavelength (Llama 3.1)
    FACTORS = "factors"  # each divided by a factor of its own (what a GGUF holds for Llama 3.1)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding over the whole head: dimensions i and i + d/2 turn together. `str()` is the fingerprint's text."""

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0  # the last four: `llama3` only
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192  # tokens
    factors: tuple[float, ...] = ()  # `factors` only, one per pair: [head_dim / 2]

    def __str__(self) -> str:
        if self.kind is RopeKind.DEFAULT:
            return f"default theta={self.theta!r}"
        if self.kind is RopeKind.FACTORS:
            return f"factors theta={self.theta!r} factors={','.join(f'{value!r}' for value in self.factors)}"
        return (
            f"llama3 theta={self.theta!r} factor={self.factor!r} low={self.low_freq_factor!r} "
            f"high={self.high_freq_factor!r} original={self.original_max_context}"
        )

    def frequency_factors(self, head_dim: int) -> tuple[float, ...]:
        """What each pair's inverse frequency θ^(−2i/d) is divided by: [head_dim / 2], all 1.0 for `default`.

        For `llama3`: 1 for short wavelengths, `factor` for long ones, blended between (Llama 3.1's smoothing).
        """
        if self.kind is RopeKind.FACTORS:
            return self.factors
        if self.kind is RopeKind.DEFAULT:
            return (1.0,) * (head_dim // 2)
        longest, shortest = (self.original_max_context / f for f in (self.low_freq_factor, self.high_freq_factor))
        factors: list[float] = []
        for pair in range(head_dim // 2):
            wavelength = 2 * math.pi * self.theta ** (2 * pair / head_dim)
            if wavelength < shortest:
                factors.append(1.0)
            elif wavelength > longest:
                factors.append(self.factor)
            else:
                span = self.high_freq_factor - self.low_freq_factor
                smooth = (self.original_max_context / wavelength - self.low_freq_factor) / span
                factors.append(1 / ((1 - smooth) / self.factor + smooth))
        return tuple(factors)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of the Llama family. Raises InvalidConfig when the numbers contradict each other."""

    shape: ModelShape
    architecture: str  # one of ARCHITECTURES
    rms_eps: float
    rope: RopeConfig
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3: RMS norm over each head of q and k, before the rotary embedding
    tied_embeddings: bool  # the LM head is the embedding
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends an answer

    def __post_init__(self) -> None:
        shape = self.shape
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"):
            if getattr(shape, name) < 1:
                raise InvalidConfig(f"the model's {name} is {getattr(shape, name)}; it must be at least 1")
        if shape.num_layers > MAX_LAYERS:
            raise InvalidConfig(f"the model's num_layers is {shape.num_layers}; more than {MAX_LAYERS} cannot be meant")
        if shape.max_context < 1:
            raise InvalidConfig("the model's context length must be at least 1 token")
        if shape.num_heads % shape.num_kv_heads:
            raise InvalidConfig(f"{shape.num_heads} heads cannot share {shape.num_kv_heads} KV heads evenly")
        if shape.head_dim % 2:
            raise InvalidConfig(f"head_dim {shape.head_dim} is odd; the rotary embedding turns pairs")
        if shape.windows and len(shape.windows) != shape.num_layers:
            raise InvalidConfig(f"{len(shape.windows)} layer types given for {shape.num_layers} layers")
        if any(window is not None and window < 1 for window in shape.windows):
            raise InvalidConfig("a sliding window must be at least 1 token")
        if not (0 < self.rope.theta < math.inf and 0 < self.rms_eps < math.inf):
            raise InvalidConfig("rope theta and the norms' epsilon must be finite and greater than 0")
        rope = self.rope
        is_ordered = rope.factor >= 1 and 0 < rope.low_freq_factor < rope.high_freq_factor and rope.original_max_context >= 1
        if rope.kind is RopeKind.LLAMA3 and not is_ordered:
            raise InvalidConfig(f"rope scaling llama3 cannot work with these values: {rope}")
        if rope.kind is RopeKind.FACTORS and len(rope.factors) != shape.head_dim // 2:
            raise InvalidConfig(f"{len(rope.factors)} rotary factors given for {shape.head_dim // 2} pairs")
        if not all(0 < factor < math.inf for factor in rope.factors):
            raise InvalidConfig("rotary factors must be finite and greater than 0")

    @property
    def text(self) -> str:
        """Every field that changes what the model computes, as stable text."""
        s = self.shape
        return (
            f"{self.architecture} L={s.num_layers} h={s.hidden_size} heads={s.num_heads}/{s.num_kv_heads}x{s.head_dim} "
            f"ffn={s.intermediate_size} vocab={s.vocab_size} context={s.max_context} windows={s.windows} eps={self.rms_eps!r} "
            f"rope=({self.rope}) qkv_bias={self.qkv_bias} qk_norm={self.qk_norm} tied={self.tied_embeddings}"
        )

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, a tied head counted once."""
        s = self.shape
        q, kv = s.num_heads * s.head_dim, s.kv_elements
        layer = (q + kv) * s.hidden_size + q * s.hidden_size + 3 * s.intermediate_size * s.hidden_size + 2 * s.hidden_size
        layer += (q + kv if self.qkv_bias else 0) + (2 * s.head_dim if self.qk_norm else 0)
        tables = s.vocab_size * s.hidden_size * (1 if self.tied_embeddings else 2)
        return s.num_layers * layer + tables + s.hidden_size
