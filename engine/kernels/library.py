"""The compiled kernels as Python functions. Knows addresses and argument lists; what a call means is its caller's business."""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from shoal.engine.kernels.build import BuildFailed, build
from shoal.engine.kernels.cpu import has_amx, missing_features
from shoal.engine.kernels.structures import StageArgs


class KernelsUnavailable(Exception):
    """This machine runs without them; the message says why."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded library. Tensors must be contiguous on the CPU and of one type; nothing is checked below this line."""

    library: ctypes.CDLL
    path: Path
    uses_amx: bool  # for large bfloat16 products

    @property
    def has_brgemm(self) -> bool:
        """Whether oneDNN's kernels were built in."""
        return hasattr(self.library, "shoal_use_brgemm")

    def attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        pool: torch.Tensor,
        runs: int,
        sizes: "ctypes.Array[ctypes.c_int64]",
        scale: float,
    ) -> None:
        """Attention over the pool; `runs` and `sizes` as entry.cpp's shoal_attend has them."""
        is_bf16 = q.dtype is torch.bfloat16
        self.library.shoal_attend(is_bf16, q.data_ptr(), out.data_ptr(), pool.data_ptr(), runs, sizes, scale)

    def run_stage(self, dtype: torch.dtype, stage: StageArgs, start: int, stop: int) -> None:
        """Half steps of a stage, as layer.cpp's run_stage counts them."""
        self.library.shoal_run_stage(dtype is torch.bfloat16, ctypes.byref(stage), start, stop)

    def score(self, x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor, eps: float) -> torch.Tensor:
        """Final norm and head: x [n, h] and head [vocab, h] → [n, vocab] float32."""
        out = torch.empty(len(x), len(head), dtype=torch.float32)
        sizes = (ctypes.c_int64 * 4)(len(x), x.shape[1], len(head), torch.get_num_threads())
        is_bf16 = x.dtype is torch.bfloat16
        self.library.shoal_score(is_bf16, x.data_ptr(), norm.data_ptr(), head.data_ptr(), out.data_ptr(), sizes, eps)
        return out

    def use_brgemm(self, use: bool) -> None:
        """Send large bfloat16 products to oneDNN's kernels (AMX where the CPU has it), or do them here."""
        if self.has_brgemm:
            self.library.shoal_use_brgemm(use)


@cache
def kernels() -> Kernels:
    """Build if needed, load, once per process. Raises KernelsUnavailable."""
    missing = missing_features()
    if missing:
        raise KernelsUnavailable(f"the CPU lacks {', '.join(missing)}")
    try:
        path = build()
        library = ctypes.CDLL(str(path))
    except (BuildFailed, OSError) as error:
        raise KernelsUnavailable(str(error)) from error
    pointer = ctypes.c_void_p
    library.shoal_attend.argtypes = [ctypes.c_int, pointer, pointer, pointer, pointer, pointer, ctypes.c_float]
    library.shoal_score.argtypes = [ctypes.c_int, pointer, pointer, pointer, pointer, pointer, ctypes.c_float]
    library.shoal_run_stage.argtypes = [ctypes.c_int, pointer, ctypes.c_int64, ctypes.c_int64]
    for function in (library.shoal_attend, library.shoal_score, library.shoal_run_stage):
        function.restype = None
    loaded = Kernels(library, path, has_amx() and hasattr(library, "shoal_use_brgemm"))
    loaded.use_brgemm(loaded.uses_amx)
    return loaded
