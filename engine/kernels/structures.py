"""The kernels' argument lists, field by field as source/layer.h has them. Knows C types, no meaning."""

import ctypes

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class LinearArgs(ctypes.Structure):
    """struct Linear."""

    _fields_ = (("packed", _POINTER), ("n", _INT), ("k", _INT))


class ProjectArgs(ctypes.Structure):
    """struct Project."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "norm", "bias", "q_norm", "k_norm")),
        ("linear", LinearArgs),
        *((name, _POINTER) for name in ("cos", "sin", "q", "pool", "blocks", "offsets")),
        *((name, _INT) for name in ("rows", "heads", "kv_heads", "d", "block_size", "num_threads")),
        ("eps", ctypes.c_double),
    )


class FinishArgs(ctypes.Structure):
    """struct Finish."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "attended", "norm", "attention_norm", "mlp_norm")),
        *((name, LinearArgs) for name in ("output", "gate_up", "down")),
        ("out", _POINTER),
        *((name, _INT) for name in ("rows", "num_threads", "gelu")),
        ("eps", ctypes.c_double),
    )


class LayerArgs(ctypes.Structure):
    """struct Layer."""

    _fields_ = (("project", ProjectArgs), ("kv", ProjectArgs), ("finish", FinishArgs))


class RowsArgs(ctypes.Structure):
    """struct Rows."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "cos", "sin", "local_cos", "local_sin", "blocks", "offsets")),
        ("rows", _INT),
    )


class StageArgs(ctypes.Structure):
    """struct Stage."""

    _fields_ = (
        *((name, _POINTER) for name in ("full_layers", "kv_layers", "windows")),
        ("full", RowsArgs),
        ("kv", RowsArgs),
        *((name, _POINTER) for name in ("q", "attended", "pool", "runs")),
        *((name, _INT) for name in ("num_runs", "heads", "kv_heads", "d", "block_size", "num_threads")),
        ("scale", ctypes.c_double),
        ("cap", ctypes.c_double),
    )
