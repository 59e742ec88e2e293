"""An adapter while it is trained: pairs of low-rank matrices, float32, for every weight of the layers it changes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shoal.model_files import DecoderConfig, Part
from shoal.model_files.adapter import ADAPTED_PARTS, adapter_tensor_name
from shoal.model_files.tensors import part_shape

Pair = tuple[Tensor, Tensor]  # A [Σ r, in] with the scale in it, B [out, Σ r], ready to multiply
_FUSED: Final = ((Part.Q, Part.K, Part.V), (Part.OUTPUT,), (Part.GATE, Part.UP), (Part.DOWN,))


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """What one layer's four fused products gain."""

    qkv: Pair
    output: Pair
    gate_up: Pair
    down: Pair


class Lora:
    """A ~ N(0, 1/in) and B = 0 for every weight, so that the untrained adapter changes nothing."""

    def __init__(self, config: DecoderConfig, first_layer: int, rank: int, alpha: float, seed: int) -> None:
        self.first_layer, self.rank, self.alpha = first_layer, rank, alpha
        self._layers = range(first_layer, config.shape.num_layers)
        generator = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, Tensor] = {}  # by PEFT's names
        for layer in self._layers:
            for part in ADAPTED_PARTS:
                rows, columns = part_shape(config, part)
                a = torch.randn((rank, columns), generator=generator) / columns**0.5
                self.parameters[adapter_tensor_name(part, layer, "A")] = a.requires_grad_()
                self.parameters[adapter_tensor_name(part, layer, "B")] = torch.zeros((rows, rank), requires_grad=True)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.parameters.values())

    def to(self, device: torch.device) -> None:
        """Move the parameters, before an optimizer knows them."""
        self.parameters = {name: t.detach().to(device).requires_grad_() for name, t in self.parameters.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take values by name, in place."""
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                tensor.copy_(tensors[name])

    def matrices(self, dtype: torch.dtype) -> dict[int, LoraLayer]:
        """The pairs of every layer in the type that products are made in; gradients reach the parameters."""
        return {layer: LoraLayer(*(self._pair(layer, parts, dtype) for parts in _FUSED)) for layer in self._layers}

    def _pair(self, layer: int, parts: tuple[Part, ...], dtype: torch.dtype) -> Pair:
        a = torch.cat([self.parameters[adapter_tensor_name(part, layer, "A")] for part in parts])
        columns = [self.parameters[adapter_tensor_name(part, layer, "B")] for part in parts]
        b: Tensor = torch.block_diag(*columns)  # type: ignore[no-untyped-call]
        return (a * (self.alpha / self.rank)).to(dtype), b.to(dtype)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.parameters.values())
