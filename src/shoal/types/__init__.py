"""The vocabulary that crosses room borders: frozen, typed, torch-free."""

from shoal.types.model import DType, Fingerprint, ModelShape
from shoal.types.request import FinishReason, SamplingParams, TokenLogprobs

__all__ = ["DType", "Fingerprint", "FinishReason", "ModelShape", "SamplingParams", "TokenLogprobs"]
