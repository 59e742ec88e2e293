"""Layers in 8-bit integers: weights by output row, and activations by token where asked for. Rounds; runs no integer kernel.

What comes out is what an int8 kernel with exact 32-bit accumulation gives. Phase-aware: give the rounded layers to prefill
tokens only (`TorchDecoder.forward(prefill_layers=…)`), and decode keeps its own.
"""

from typing import Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.quality.baselines.copies import with_own_layers
from shoal.quality.torch_model import DecoderLayer, TorchDecoder

_LEVELS: Final = 127.0


def rounded(x: Tensor) -> Tensor:
    """x with each row (last dimension) on its own symmetric grid of 255 values."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _LEVELS
    return (x / scale).round() * scale


class Int8Linear(nn.Module):
    """A linear map on rounded weights, and on rounded activations where asked for."""

    def __init__(self, linear: nn.Linear, *, activations: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(rounded(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias
        self.activations = activations

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(rounded(x) if self.activations else x, self.weight, self.bias)


@torch.no_grad()
def rounded_model(model: TorchDecoder, *, activations: bool) -> TorchDecoder:
    """A copy whose layers are in int8 for both phases; embedding, norms and head stay as they are."""
    made = with_own_layers(model)
    for layer in made.model.layers:
        for part in (cast(DecoderLayer, layer).self_attn, cast(DecoderLayer, layer).mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Int8Linear(child, activations=activations))
    return made


def rounded_layers(model: TorchDecoder, *, activations: bool) -> tuple[DecoderLayer, ...]:
    """The layers of such a copy, for prefill tokens alone."""
    return layers_of(rounded_model(model, activations=activations))


def layers_of(model: TorchDecoder) -> tuple[DecoderLayer, ...]:
    """What `forward` takes as `prefill_layers`."""
    return tuple(cast(DecoderLayer, layer) for layer in model.model.layers)
