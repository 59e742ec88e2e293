"""Element types as torch names them. Knows nothing else."""

import torch

from shoal.types import DType

_TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of `dtype`."""
    return _TORCH[dtype]
