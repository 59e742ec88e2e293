"""Counter-based Gumbel noise: a hash of (seed, child, position, vocabulary id), so that no batch can change it (design §2)."""

from collections.abc import Sequence
from typing import Final

import torch

from shoal.engine.sampling.rows import SampleRow

_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # SplitMix64's constants, as signed 64-bit integers
_MIX: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def gumbel(rows: Sequence[SampleRow], token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise float64 for `token_ids` [rows or 1, m], a function of each row's key and the vocabulary id alone."""
    device = token_ids.device
    parts = [(_signed(row.params.seed), row.child, row.position) for row in rows]
    key = torch.zeros(len(rows), dtype=torch.int64, device=device)
    for part in torch.tensor(parts, dtype=torch.int64, device=device).T:
        key = _mixed((key ^ part) + _GOLDEN)
    x = _mixed(key[:, None] + (token_ids + 1) * _GOLDEN)  # wrapping
    uniform = (_shifted(x, 12).to(torch.float64) + 0.5) * 2.0**-52  # 52 bits: with 53 the half rounds the largest up to 1
    return -torch.log(-torch.log(uniform))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64, wrapping."""
    x = (x ^ _shifted(x, 30)) * _MIX[0]
    x = (x ^ _shifted(x, 27)) * _MIX[1]
    return x ^ _shifted(x, 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
