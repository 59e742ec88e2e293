"""The rotary embedding in numbers: its base and how frequencies are adjusted. Knows no file format and no tensors."""

import math
from dataclasses import dataclass
from enum import StrEnum

from shoal.errors import InvalidConfig


class RopeKind(StrEnum):
    """How the inverse frequencies θ^(−2i/d) are adjusted."""

    DEFAULT = "default"  # not at all
    LLAMA3 = "llama3"  # by wavelength (Llama 3.1)
    LINEAR = "linear"  # all divided by one factor (Gemma 3's global layers)
    FACTORS = "factors"  # each divided by a factor of its own (what a GGUF holds for Llama 3.1)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding over the whole head: dimensions i and i + d/2 turn together. `str()` is the fingerprint's text."""

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0  # `llama3` and `linear`
    low_freq_factor: float = 1.0  # the next three: `llama3` only
    high_freq_factor: float = 4.0
    original_max_context: int = 8192  # tokens
    factors: tuple[float, ...] = ()  # `factors` only, one per pair: [head_dim / 2]

    def __str__(self) -> str:
        if self.kind is RopeKind.DEFAULT:
            return f"default theta={self.theta!r}"
        if self.kind is RopeKind.LINEAR:
            return f"linear theta={self.theta!r} factor={self.factor!r}"
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
        if self.kind is RopeKind.LINEAR:
            return (self.factor,) * (head_dim // 2)
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

    def check(self, head_dim: int) -> None:
        """Raises InvalidConfig when the numbers cannot be, or do not fit heads of this size."""
        if not 0 < self.theta < math.inf:
            raise InvalidConfig("rope theta must be finite and greater than 0")
        is_ordered = self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor and self.original_max_context >= 1
        if self.kind is RopeKind.LLAMA3 and not is_ordered:
            raise InvalidConfig(f"rope scaling llama3 cannot work with these values: {self}")
        if self.kind is RopeKind.LINEAR and not 0 < self.factor < math.inf:
            raise InvalidConfig(f"rope scaling linear needs a factor greater than 0, not {self.factor}")
        if self.kind is RopeKind.FACTORS and len(self.factors) != head_dim // 2:
            raise InvalidConfig(f"{len(self.factors)} rotary factors given for {head_dim // 2} pairs")
        if not all(0 < factor < math.inf for factor in self.factors):
            raise InvalidConfig("rotary factors must be finite and greater than 0")
