"""Everything that decides what a tuning run gives: one frozen object. Knows no tensors.

The defaults are the recipe that docs/tuning.md measures.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from shoal.errors import InvalidConfig, Unsupported
from shoal.types import DType
from shoal.visibility import Visibility, VisibilityKind


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """A run with equal options, data and number of processes gives the same adapter, also when it was stopped in between.

    Raises InvalidConfig when a value cannot work, Unsupported for a visibility that is not tuned.
    """

    visibility: Visibility  # as it will be served, with its boundary
    tokens: int = 640_000  # of all sequences that pass through the model, over all processes
    rank: int = 16
    alpha: float = 32.0  # the adapter adds alpha / rank · B·A
    first_layer: int = 8  # layers below stay as they are, and the teacher shares them
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    sequence_tokens: int = 640  # of a window over plain texts
    batch_sequences: int = 1  # in one step of one process
    response_tokens: tuple[int, ...] = (32, 48, 64, 96, 128)  # lengths that a step cuts a window's responses to
    candidates: int = 12_288  # tokens, the data's most frequent, over which distillation compares; 0: the whole vocabulary
    supervised: bool = False  # the data's own tokens as targets, in place of the full-depth model's distribution
    clip_norm: float = 1.0
    seed: int = 0
    dtype: DType = DType.BFLOAT16  # of frozen weights and activations; the adapter and its optimizer are float32
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.visibility.kind is VisibilityKind.POP:
            raise Unsupported("pop is made to work without tuning and is not tuned here; tune speed:K, or full as the control")
        floors = {"tokens": 1, "rank": 1, "first_layer": 0, "warmup_steps": 0, "batch_sequences": 1, "candidates": 0, "seed": 0}
        for name, floor in {**floors, "sequence_tokens": 8}.items():
            if getattr(self, name) < floor:
                raise InvalidConfig(f"{name} must be at least {floor}, not {getattr(self, name)}")
        for name in ("alpha", "learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidConfig(f"{name} must be a number greater than 0, not {getattr(self, name)}")
        longest = self.sequence_tokens - max(1, self.visibility.anchor_tokens)
        if not self.response_tokens or not all(1 <= length <= longest for length in self.response_tokens):
            raise InvalidConfig(f"response_tokens must be lengths of 1…{longest}, less than a window of {self.sequence_tokens}")

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able, for the adapter's notes."""
        return asdict(self) | {
            "visibility": str(self.visibility),
            "dtype": str(self.dtype),
            "response_tokens": list(self.response_tokens),
        }

    def digest(self, *of: object) -> str:
        """Of everything that a run may not change half-way, and of what else is given. A diverged run may go on slower."""
        kept = {name: value for name, value in self.to_mapping().items() if name != "learning_rate"}
        return hashlib.sha256(json.dumps([kept, *of], sort_keys=True, default=str).encode()).hexdigest()[:16]

    def rate_at(self, step: int, num_steps: int) -> float:
        """The learning rate of a step: warm-up, then a cosine down to a twentieth."""
        fall = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / max(1, num_steps)))
        return self.learning_rate * fall * min(1.0, (step + 1) / max(1, self.warmup_steps))
