"""Attention by the compiled kernels, reading K and V in place. Knows runs and addresses; builds nothing."""

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch

from shoal.engine.kernels import Kernels, kernels
from shoal.engine.query_runs import QueryRun
from shoal.engine.score_rule import ScoreRule
from shoal.types import ModelShape

LOG2_E = math.log2(math.e)


class RunTable:
    """Runs as the kernels read them (struct Run), with the block ids that they point to."""

    def __init__(self, runs: Sequence[QueryRun]) -> None:
        self._ids = [np.ascontiguousarray(run.block_ids, dtype=np.int32) for run in runs]  # kept: the table points there
        rows = [
            (
                run.first_row,
                run.num_rows,
                run.start_slot,
                ids.ctypes.data,
                ids.strides[0],
                run.geometry.num_anchors,
                run.geometry.gap,
                run.geometry.sink,
                run.is_causal,
            )
            for run, ids in zip(runs, self._ids, strict=True)
        ]
        self._rows = np.array(rows, dtype=np.int64)
        self.address: int = self._rows.ctypes.data


class NativeAttentionStage:
    """One stage's attention; see PreparedAttention."""

    def __init__(
        self,
        library: Kernels,
        runs: Sequence[QueryRun],
        window: int | None,
        shape: ModelShape,
        block_size: int,
        rule: ScoreRule,
    ) -> None:
        self._kernels = library
        self._runs = RunTable(runs)
        self._scale, self._cap = LOG2_E * rule.scale, LOG2_E * (rule.cap or 0.0)
        sizes = (len(runs), 0, window or 0, shape.num_heads, shape.num_kv_heads, shape.head_dim, block_size, 1, 0)
        self._sizes = (ctypes.c_int64 * len(sizes))(*sizes)

    def attend(self, q: torch.Tensor, kv: torch.Tensor | None, pool_rows: torch.Tensor, layer_index: int) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        self._sizes[1] = layer_index
        self._sizes[7] = torch.get_num_threads()
        self._sizes[8] = q.stride(0)
        self._kernels.attend(q, out, pool_rows, self._runs.address, self._sizes, self._scale, self._cap)
        return out


class NativeAttention:
    """The back end "native"; see AttentionBackend. Raises KernelsUnavailable where there are no kernels."""

    def __init__(self, rule: ScoreRule | None = None) -> None:
        self._kernels = kernels()
        self._rule = rule

    def prepare(
        self, runs: Sequence[QueryRun], window: int | None, shape: ModelShape, pool_rows: torch.Tensor, block_size: int
    ) -> NativeAttentionStage:
        return NativeAttentionStage(self._kernels, runs, window, shape, block_size, self._rule or ScoreRule.usual(shape))
