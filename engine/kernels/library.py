"""The compiled kernels as Python functions. Knows addresses and argument lists; what a call means is its caller's business."""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.engine.kernels.build import BuildFailed, build
from shoal.engine.kernels.cpu import InstructionSet, has_amx, missing_features, named_instructions, widens_bfloat16
from shoal.engine.kernels.structures import StageArgs

_log = logging.getLogger(__name__)


class KernelsUnavailable(Exception):
    """This machine runs without them; the message says why."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded library. Tensors must be contiguous on the CPU and of one type; nothing is checked below this line."""

    library: ctypes.CDLL
    path: Path
    instructions: InstructionSet
    uses_amx: bool  # for large bfloat16 products
    uses_floats: bool  # for all bfloat16 products of layers and long prompts

    def attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        pool: torch.Tensor,
        runs: int,
        sizes: "ctypes.Array[ctypes.c_int64]",
        scale: float,
        cap: float,
    ) -> None:
        """Attention over the pool; `runs` and `sizes` as attention.cpp's shoal_attend has them. Scale and soft cap (0 = none)
        are times log2 e."""
        is_bf16 = q.dtype is torch.bfloat16
        self.library.shoal_attend(is_bf16, q.data_ptr(), out.data_ptr(), pool.data_ptr(), runs, sizes, scale, cap)

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

    def copy_slots(self, pool: torch.Tensor, wire: torch.Tensor, ids: NDArray[np.int32], slots: range, *, to_wire: bool) -> None:
        """Slots of a pool [blocks, 2, kv_heads, block_size, head_dim], the blocks that hold them given by `ids`, to or from a
        message [slots, 2, kv_heads, head_dim]."""
        _, two, kv_heads, block_size, head_dim = pool.shape
        row_bytes = head_dim * pool.element_size()
        sizes = (ctypes.c_int64 * 5)(slots.start, slots.stop, two * kv_heads, block_size, row_bytes)
        self.library.shoal_copy_slots(pool.data_ptr(), wire.data_ptr(), ids.ctypes.data, sizes, to_wire)

    def sum_words(self, words: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Sums of 64-bit words [rows, width], modulo 2^64: by column [width] and by row [rows]."""
        columns, rows = np.zeros(words.shape[1], np.uint64), np.empty(len(words), np.uint64)
        self.library.shoal_sum_words(words.ctypes.data, *words.shape, columns.ctypes.data, rows.ctypes.data)
        return columns, rows

    def use_amx(self, use: bool) -> bool:
        """Do large bfloat16 products on the tile unit, or not; whether they now are. Only for a CPU that has one."""
        return bool(self.library.shoal_use_amx(use))

    def use_floats(self, use: bool) -> None:
        """Multiply bfloat16 as floats, or not. Not beside AMX."""
        self.library.shoal_use_floats(use)

    def phase_seconds(self) -> tuple[float, float, float]:
        """Wall time that this thread's steps have spent in projections, attention and the rest of the layers so far."""
        seconds = (ctypes.c_double * 3)()
        self.library.shoal_phase_seconds(seconds)
        return seconds[0], seconds[1], seconds[2]


@cache
def kernels_or_none() -> Kernels | None:
    """For what has another way to do the same."""
    try:
        return kernels()
    except KernelsUnavailable:
        return None


@cache
def kernels() -> Kernels:
    """Build if needed, load, once per process. Raises KernelsUnavailable; InvalidConfig for a SHOAL_INSTRUCTIONS that is none."""
    instructions = _instructions()
    try:
        path = build(instructions)
        library = ctypes.CDLL(str(path))
    except (BuildFailed, OSError) as error:
        raise KernelsUnavailable(str(error)) from error
    _declare(library)
    may_use_amx = instructions is InstructionSet.AVX512 and has_amx()
    uses_amx = may_use_amx and bool(library.shoal_use_amx(True))
    if may_use_amx and not uses_amx:
        _log.warning("the system does not let this process use AMX; large bfloat16 products take several times as long")
    uses_floats = not uses_amx and (instructions is InstructionSet.AVX2 or widens_bfloat16())
    library.shoal_use_floats(uses_floats)
    unit = "tiles" if uses_amx else "floats" if uses_floats else "words"
    _log.info("kernels for %s are loaded; bfloat16 is multiplied in %s", instructions, unit)
    return Kernels(library, path, instructions, uses_amx, uses_floats)


def _instructions() -> InstructionSet:
    """The best that this processor has, or what SHOAL_INSTRUCTIONS names."""
    named = named_instructions()
    allowed = list(InstructionSet) if named is None else [named]
    missing = {instructions: missing_features(instructions) for instructions in allowed}
    for instructions, lacks in missing.items():
        if not lacks:
            return instructions
    raise KernelsUnavailable(f"the CPU lacks {', '.join(missing[allowed[-1]])}")


def _declare(library: ctypes.CDLL) -> None:
    pointer = ctypes.c_void_p
    library.shoal_attend.argtypes = [ctypes.c_int, pointer, pointer, pointer, pointer, pointer, ctypes.c_float, ctypes.c_float]
    library.shoal_score.argtypes = [ctypes.c_int, pointer, pointer, pointer, pointer, pointer, ctypes.c_float]
    library.shoal_run_stage.argtypes = [ctypes.c_int, pointer, ctypes.c_int64, ctypes.c_int64]
    library.shoal_copy_slots.argtypes = [pointer, pointer, pointer, pointer, ctypes.c_int]
    library.shoal_sum_words.argtypes = [pointer, ctypes.c_int64, ctypes.c_int64, pointer, pointer]
    for name in ("attend", "score", "run_stage", "copy_slots", "sum_words"):
        getattr(library, f"shoal_{name}").restype = None
    library.shoal_phase_seconds.argtypes = [pointer]
    library.shoal_phase_seconds.restype = None
