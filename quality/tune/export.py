"""Writes an adapter as PEFT reads it, and beside it what PEFT has no words for. Knows no training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from shoal.model_files import ModelFiles
from shoal.model_files.adapter import ADAPTED_PARTS, ADAPTER_CONFIG, ADAPTER_NOTES, ADAPTER_WEIGHTS
from shoal.model_files.tensors import FileFormat, tensor_name
from shoal.quality.tune.checkpoint import write_json, write_tensors

_TARGETS: Final = sorted(tensor_name(FileFormat.HF, part, 0).split(".")[-2] for part in ADAPTED_PARTS)


def write_adapter(
    folder: Path,
    files: ModelFiles,
    parameters: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: float,
    layers: range,
    dtype: torch.dtype,
    notes: Mapping[str, Any],
) -> None:
    """`parameters` by PEFT's names. `notes` must hold the visibility, as `notes["visibility"]`. Raises InvalidConfig."""
    write_tensors(folder / ADAPTER_WEIGHTS, {name: t.to(dtype) for name, t in parameters.items()}, {"format": "pt"})
    write_json(
        folder / ADAPTER_CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": files.name,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "inference_mode": True,
            "target_modules": _TARGETS,
            "layers_to_transform": list(layers),
            "layers_pattern": "layers",
        },
    )
    write_json(folder / ADAPTER_NOTES, {"base_model": files.name, "base_revision": files.revision, **notes})
