"""The vocabulary that crosses room borders: frozen, typed, torch-free."""

from shoal.types.model import DType, Fingerprint, ModelShape
from shoal.types.request import Constraint, ConstraintKind, FinishReason, SamplingParams, TokenLogprobs

__all__ = [
    "Constraint",
    "ConstraintKind",
    "DType",
    "Fingerprint",
    "FinishReason",
    "ModelShape",
    "SamplingParams",
    "TokenLogprobs",
]
