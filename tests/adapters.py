"""Random adapters for tests: as `shoal tune` writes them, with a B that is not 0."""

from pathlib import Path

import torch

from shoal.model_files import ModelFiles
from shoal.quality.tune.export import write_adapter
from shoal.quality.tune.lora import Lora


def write_random_adapter(
    folder: Path, model: ModelFiles, visibility: str | None = "speed:2", *, seed: int = 0, first_layer: int = 1
) -> Path:
    """An adapter that changes every weight from `first_layer` up by about a tenth. Returns the folder."""
    lora = Lora(model.config, first_layer, rank=4, alpha=8.0, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, tensor in lora.parameters.items():
        if ".lora_B." in name:
            tensor.data = torch.randn(tensor.shape, generator=generator) * 0.05
    layers = range(first_layer, model.config.shape.num_layers)
    notes = {} if visibility is None else {"visibility": visibility}
    write_adapter(folder, model, lora.parameters, rank=4, alpha=8.0, layers=layers, dtype=torch.float32, notes=notes)
    return folder
