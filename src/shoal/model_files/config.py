"""What a decoder is, in numbers: shape, rotary embedding, norms. Knows no file format and no weights."""

import math
from dataclasses import dataclass

from shoal.errors import InvalidConfig
from shoal.model_files.families import Activation
from shoal.model_files.rope import RopeConfig
from shoal.types import ModelShape

MAX_LAYERS = 10_000


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
    activation: Activation = Activation.SILU
    branch_norms: bool = False  # Gemma 2, 3: an RMS norm behind attention and behind the MLP, before each residual
    embedding_scale: float = 1.0  # Gemma: √h
    score_scale: float | None = None  # of attention scores; None = head_dim^−½
    local_rope: RopeConfig | None = None  # of window layers, where it is another one (Gemma 3)
    attention_softcap: float | None = None  # scores become cap · tanh(score / cap) (Gemma 2)
    logit_softcap: float | None = None  # and so do logits
    mrope_section: tuple[int, int, int] | None = None  # pairs of a head that turn by time, height and width (Qwen3-VL)

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
        scales = [self.rms_eps, self.embedding_scale, self.attention_scale, self.attention_softcap, self.logit_softcap]
        if not all(scale is None or 0 < scale < math.inf for scale in scales):
            raise InvalidConfig("the norms' epsilon, scales and soft caps must be finite and greater than 0")
        if self.mrope_section is not None and (
            min(self.mrope_section) < 0 or sum(self.mrope_section) != shape.head_dim // 2 or self.local_rope is not None
        ):
            raise InvalidConfig(f"mrope_section {self.mrope_section} does not share out {shape.head_dim // 2} pairs")
        for rope in (self.rope, self.local_rope):
            if rope is not None:
                rope.check(shape.head_dim)

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return self.shape.head_dim**-0.5 if self.score_scale is None else self.score_scale

    def rope_of(self, layer: int) -> RopeConfig:
        """The layer's rotary embedding."""
        return self.local_rope if self.local_rope is not None and self.shape.window(layer) is not None else self.rope

    @property
    def rope_text(self) -> str:
        """Of both rotary embeddings, for the fingerprint."""
        text = str(self.rope) if self.local_rope is None else f"{self.rope} local=({self.local_rope})"
        return text if self.mrope_section is None else f"{text} sections={self.mrope_section}"

    @property
    def text(self) -> str:
        """Every field that changes what the model computes, as stable text."""
        s = self.shape
        text = (
            f"{self.architecture} L={s.num_layers} h={s.hidden_size} heads={s.num_heads}/{s.num_kv_heads}x{s.head_dim} "
            f"ffn={s.intermediate_size} vocab={s.vocab_size} context={s.max_context} windows={s.windows} eps={self.rms_eps!r} "
            f"rope=({self.rope}) qkv_bias={self.qkv_bias} qk_norm={self.qk_norm} tied={self.tied_embeddings}"
        )
        later = {name: getattr(self, name) for name in _LATER_FIELDS}  # named only where they are not Llama's
        return text + "".join(f" {name}={value}" for name, value in later.items() if value != _LATER_FIELDS[name])

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, a tied head counted once."""
        s = self.shape
        q, kv = s.num_heads * s.head_dim, s.kv_elements
        layer = (q + kv) * s.hidden_size + q * s.hidden_size + 3 * s.intermediate_size * s.hidden_size + 2 * s.hidden_size
        layer += (q + kv if self.qkv_bias else 0) + (2 * s.head_dim if self.qk_norm else 0)
        layer += 2 * s.hidden_size if self.branch_norms else 0
        tables = s.vocab_size * s.hidden_size * (1 if self.tied_embeddings else 2)
        return s.num_layers * layer + tables + s.hidden_size


_LATER_FIELDS = {  # and their values in Llama's family
    "activation": Activation.SILU,
    "branch_norms": False,
    "embedding_scale": 1.0,
    "score_scale": None,
    "local_rope": None,
    "attention_softcap": None,
    "logit_softcap": None,
    "mrope_section": None,
}


def window_pattern(num_layers: int, window: int, pattern: int) -> tuple[int | None, ...]:
    """`window` in every layer but each `pattern`-th. Raises InvalidConfig for a pattern below 1."""
    if pattern < 1:
        raise InvalidConfig(f"a window pattern of {pattern} cannot be; it must be at least 1")
    windows = tuple(None if (layer + 1) % pattern == 0 else window for layer in range(num_layers))
    return windows if any(windows) else ()
