"""Weights in the order in which the kernels read them (source/gemm.h). Knows shapes; computes nothing."""

import torch

from shoal.engine.kernels.memory import Arena
from shoal.engine.kernels.structures import LinearArgs

PANEL = 32  # columns; as in source/layer.h


class PackedLinear:
    """A weight [n, k] as panels of 32-bit words [n / 32, words, 32], rows beyond n zero. Keeps the memory alive."""

    def __init__(self, weight: torch.Tensor, arena: Arena) -> None:
        self.n, self.k = weight.shape
        self.words = _in_order(_panels(weight, PANEL), arena)

    @classmethod
    def gate_up(cls, weight: torch.Tensor, arena: Arena) -> "PackedLinear":
        """Rows ordered gate, up [2·ffn, k] → each panel holds 16 rows of gate and the 16 of up that belong to them."""
        gate, up = (_panels(half, PANEL // 2) for half in weight.chunk(2))
        both = torch.cat([gate, up], dim=1)  # [ffn / 16, 32, words]
        packed = cls.__new__(cls)
        packed.n, packed.k = both.shape[0] * PANEL, weight.shape[1]
        packed.words = _in_order(both, arena)
        return packed

    def from_row(self, first: int) -> "PackedLinear":
        """The rows from `first` (a multiple of 32) on, sharing memory."""
        packed = PackedLinear.__new__(PackedLinear)
        packed.n, packed.k = self.n - first, self.k
        packed.words = self.words[first // PANEL :]
        return packed

    @property
    def args(self) -> LinearArgs:
        """What a kernel is given."""
        return LinearArgs(self.words.data_ptr(), self.n, self.k)


def _panels(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """[n, k] → words [n / rows, rows, words], padded with zeros."""
    words = weight.contiguous().view(torch.int32)
    missing = -words.shape[0] % rows
    if missing:
        words = torch.cat([words, words.new_zeros(missing, words.shape[1])])
    return words.view(-1, rows, words.shape[1])


def _in_order(panels: torch.Tensor, arena: Arena) -> torch.Tensor:
    """[panels, rows, words] → [panels, words, rows]."""
    panels = panels.transpose(1, 2)
    return arena.empty(tuple(panels.shape), torch.int32).copy_(panels)
