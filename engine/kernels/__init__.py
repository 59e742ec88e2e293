"""Compiled kernels for CPUs, built from source on first use. Knows compilers and addresses; what is computed lies in source/."""

from shoal.engine.kernels.library import Kernels, KernelsUnavailable, kernels, kernels_or_none

__all__ = ["Kernels", "KernelsUnavailable", "kernels", "kernels_or_none"]
