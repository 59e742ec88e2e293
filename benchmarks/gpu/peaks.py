"""What this device can do at best, measured: a large matrix product, a large copy."""

from collections.abc import Iterator

import torch

from benchmarks.gpu.clock import median_seconds
from benchmarks.gpu.report import Line
from benchmarks.gpu.sizes import Sizes


def matrix_flops(device: torch.device, sizes: Sizes) -> float:
    """FLOP/s of a square bfloat16 product."""
    n = sizes.matrix_rows
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / median_seconds(lambda: a @ b, device, 10)


def copy_bytes(device: torch.device, sizes: Sizes) -> float:
    """Bytes/s read and written by a copy of 1 GiB (64 MiB on a CPU)."""
    num_bytes = 1 << (30 if sizes.is_real else 26)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_seconds(lambda: target.copy_(source), device, 10)


def measure(device: torch.device, sizes: Sizes, deadline: float) -> Iterator[Line]:
    yield Line("peak of matrix products, bfloat16", f"{matrix_flops(device, sizes) / 1e12:.1f} TFLOP/s")
    yield Line("peak of copies, read + written", f"{copy_bytes(device, sizes) / 1e12:.3f} TB/s")
