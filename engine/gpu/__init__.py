"""CUDA: fused operations in Triton, attention that reads KV in place, and decode steps recorded as CUDA graphs.

Nothing here is imported on a machine without a GPU, apart from tests that run the kernels in Triton's interpreter.
"""
