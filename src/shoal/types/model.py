"""What arithmetic, placement and handshake need to know of a model. Knows no weights and no torch."""

from dataclasses import dataclass, fields
from enum import StrEnum


class DType(StrEnum):
    """Element type of weights, hidden states and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def num_bytes(self) -> int:
        return {DType.FLOAT32: 4, DType.BFLOAT16: 2}[self]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The counts every formula of design §2 is written in."""

    num_layers: int  # L
    hidden_size: int  # h
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int  # tokens
    windows: tuple[int | None, ...] = ()  # sliding window w per layer; () = every layer global

    def window(self, layer: int) -> int | None:
        """The layer's sliding window in tokens (a query at p sees p−w+1 … p), or None when it sees everything."""
        return self.windows[layer] if self.windows else None

    @property
    def kv_elements(self) -> int:
        """Elements of K and V one token leaves in one layer: 2 · kv_heads · head_dim."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two workers must agree on before KV may cross between them."""

    revision: str  # digest of the model's configuration and weights
    adapter: str  # "" = none
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    block_size: int  # tokens
    rope: str  # digest-free text of the rotary parameters
    max_entry_bytes: int
    max_entry_tokens: int  # wire size of one plan entry

    def differences(self, other: "Fingerprint") -> list[str]:
        """One 'name: mine != theirs' per field that differs."""
        names = [field.name for field in fields(self)]
        return [f"{n}: {getattr(self, n)} != {getattr(other, n)}" for n in names if getattr(self, n) != getattr(other, n)]
