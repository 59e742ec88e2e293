"""The fused operations on tensors: shapes checked, grids chosen, kernels launched. Knows no requests and no layers.

Raises ImportError, when this module is imported, where Triton is not installed.
"""

import math
from dataclasses import dataclass

import torch
import triton

from shoal.engine.gpu import kernels
from shoal.errors import InternalError

_LOG2_E = math.log2(math.e)
_KEYS = 64  # keys a program of attention reads at once
_MIN_GROUP = 16  # rows of the smallest matrix product on tensor cores
_PROGRAMS_WANTED = {"cuda": 528, "cpu": 16}  # four for each of an H200's 132 multiprocessors; in the interpreter, some


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of the rows of x [n, h]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    kernels.rms_norm[(x.numel() // width,)](x, weight, out, width, eps, WIDTH=triton.next_power_of_2(width))
    return out


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of gate_up [n, 2·ffn] → [n, ffn]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    kernels.silu_multiply[(num_rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
    return out


@dataclass(frozen=True, slots=True)
class KvPlaces:
    """Where rows leave their K and V in one layer."""

    blocks: torch.Tensor  # [n] integers; negative: nowhere
    offsets: torch.Tensor  # [n] within the block


def rotate_and_store(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pool: torch.Tensor, places: KvPlaces, num_kv_heads: int
) -> None:
    """Turn q and k of `heads` [n, q + 2·kv heads, d] in place by cos and sin [n, d/2] float32; copy k and v to KvPool.data."""
    num_rows, num_heads, d = heads.shape
    if heads.stride()[1:] != (d, 1) or pool.dtype is not heads.dtype or cos.dtype is not torch.float32:
        raise InternalError(f"heads {tuple(heads.shape)} of {heads.dtype} cannot be turned and stored in a pool of {pool.dtype}")
    first_key = num_heads - 2 * num_kv_heads
    kernels.rotate_and_store[(num_rows, num_heads)](
        heads,
        cos,
        sin,
        pool,
        places.blocks,
        places.offsets,
        heads.stride(0),
        num_turning=first_key + num_kv_heads,
        first_key=first_key,
        kv_heads=num_kv_heads,
        block_size=pool.shape[3],
        half=d // 2,
        HALF=triton.next_power_of_2(d // 2),
    )


@dataclass(frozen=True, slots=True)
class RowKeys:
    """What single rows see in one layer: slots starts … slots of their block tables, both ends included."""

    table: torch.Tensor  # [n, blocks] int32
    slots: torch.Tensor  # [n] int32, the row's own; negative: padding, which sees nothing
    starts: torch.Tensor  # [n] int32


def attend_rows(q: torch.Tensor, pool: torch.Tensor, keys: RowKeys, scale: float) -> torch.Tensor:
    """Attention of single rows over paged keys, read where they lie: q [n, heads, d] → [n, heads, d]."""
    num_rows, num_heads, d = q.shape
    num_kv_heads, block_size = pool.shape[2], pool.shape[3]
    group = num_heads // num_kv_heads
    num_parts = max(1, min(64, _PROGRAMS_WANTED[q.device.type] // (num_rows * num_kv_heads)))
    partial = torch.empty(num_rows, num_kv_heads, num_parts, group, d + 2, dtype=torch.float32, device=q.device)
    out = torch.empty(num_rows, num_heads, d, dtype=q.dtype, device=q.device)
    padded = triton.next_power_of_2(d)
    kernels.attend_part[(num_rows, num_kv_heads, num_parts)](
        q,
        pool,
        keys.table,
        keys.slots,
        keys.starts,
        partial,
        keys.table.stride(0),
        q.stride(0),
        _LOG2_E * scale,
        block_size=block_size,
        kv_heads=num_kv_heads,
        group=group,
        d=d,
        NUM_PARTS=num_parts,
        GROUP=max(_MIN_GROUP, triton.next_power_of_2(group)),
        D=padded,
        KEYS=_KEYS,
    )
    kernels.attend_join[(num_rows, num_heads)](
        partial,
        keys.slots,
        out,
        kv_heads=num_kv_heads,
        group=group,
        d=d,
        NUM_PARTS=num_parts,
        PARTS=triton.next_power_of_2(num_parts),
        D=padded,
    )
    return out
