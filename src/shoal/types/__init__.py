"""The vocabulary that crosses room borders: frozen, typed, torch-free."""

from shoal.types.images import ImageSpan, PromptImage
from shoal.types.model import DType, Fingerprint, ModelShape
from shoal.types.priority import USUAL_TURN, Priority, Turn
from shoal.types.request import Constraint, ConstraintKind, FinishReason, SamplingParams, TokenLogprobs

__all__ = [
    "USUAL_TURN",
    "Constraint",
    "ConstraintKind",
    "DType",
    "Fingerprint",
    "FinishReason",
    "ImageSpan",
    "ModelShape",
    "Priority",
    "PromptImage",
    "SamplingParams",
    "TokenLogprobs",
    "Turn",
]
