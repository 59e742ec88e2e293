"""What becomes of attention's scores before the softmax: a scale, and Gemma 2's soft cap. Knows numbers only."""

from dataclasses import dataclass
from typing import Self

from shoal.model_files import DecoderConfig
from shoal.types import ModelShape


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """score = q · k · scale, then cap · tanh(score / cap)."""

    scale: float
    cap: float | None = None

    @classmethod
    def of(cls, config: DecoderConfig) -> Self:
        """A model's own."""
        return cls(config.attention_scale, config.attention_softcap)

    @classmethod
    def usual(cls, shape: ModelShape) -> Self:
        """head_dim^−½ and no cap."""
        return cls(shape.head_dim**-0.5)
