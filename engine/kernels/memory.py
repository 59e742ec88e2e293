"""Memory in large pages where the system grants them: long walks through weights and KV miss the address cache less often."""

import ctypes
import math
import platform

import torch

_PAGE = 2 << 20  # bytes of a large page
_MADV_HUGEPAGE = 14


def prefer_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for large pages under the tensor; best done before it is first written. Returns it. Never fails: it is a wish."""
    if tensor.device.type == "cpu" and platform.system() == "Linux":
        start = -(-tensor.data_ptr() // _PAGE) * _PAGE
        length = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE - start
        if length > 0:
            ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return tensor


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory in large pages, on the CPU. A large one is moved to the page border, so that it starts with one."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < 4 * _PAGE:
        return torch.empty(shape, dtype=dtype)
    raw = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
    first = -raw.data_ptr() % _PAGE
    return prefer_large_pages(raw[first : first + num_bytes]).view(dtype).view(shape)


class Arena:
    """Hands out uninitialised CPU memory from slabs in large pages, for many tensors that are each too small for such pages.

    What it handed out stays valid for as long as any tensor of the same slab lives.
    """

    _SLAB = 64 << 20  # bytes; what is never written is never resident
    _LINE = 64

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that starts at a cache line."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > len(self._slab):
            self._slab, self._used = empty((max(self._SLAB, num_bytes),), torch.uint8), 0
        first = self._used
        self._used = -(-(first + num_bytes) // self._LINE) * self._LINE
        return self._slab[first : first + num_bytes].view(dtype).view(shape)
