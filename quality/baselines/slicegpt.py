"""SliceGPT (arXiv 2401.15024): keep the hidden state's leading principal components, found anew before each block.

What is computed here is what a sliced model computes, written in the full width: slicing weights to a basis Q and carrying the
residual over by QᵀQ′ is the same as projecting the hidden state onto the kept components before each block, because RMS norm
without its scale commutes with rotations and SliceGPT's norm goes on dividing by the full width. Saves nothing here; the
figures of quality are those of the sliced model.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from shoal.errors import Unsupported
from shoal.quality.baselines.copies import calibration_batch
from shoal.quality.torch_model import DecoderLayer, Example, TorchDecoder


class _Slicer(nn.Module):
    """Projects onto components that it takes from the first hidden states it sees."""

    def __init__(self, num_kept: int) -> None:
        super().__init__()
        self.num_kept = num_kept
        self.basis: Tensor | None = None  # [h, num_kept]

    def forward(self, x: Tensor) -> Tensor:
        if self.basis is None:
            rows = x.flatten(0, -2).double()
            rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-9)
            _, vectors = torch.linalg.eigh(rows.T @ rows)  # ascending
            self.basis = vectors[:, -self.num_kept :].to(x.dtype)
        return x @ self.basis @ self.basis.T


class _SlicedLayer(DecoderLayer):
    """A layer of another model's modules, its hidden state sliced after each branch."""

    def __init__(self, layer: DecoderLayer, num_kept: int) -> None:
        nn.Module.__init__(self)
        for name, part in layer.named_children():
            setattr(self, name, part)
        self.pre_feedforward_layernorm = self.post_feedforward_layernorm = None
        self.middle, self.end = _Slicer(num_kept), _Slicer(num_kept)

    def add_attention(self, x: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        return cast(Tensor, self.middle(super().add_attention(x, attended, gate)))

    def add_mlp(self, x: Tensor, gate: Tensor | None) -> Tensor:
        return cast(Tensor, self.end(super().add_mlp(x, gate)))


def sliced_model(model: TorchDecoder, examples: Sequence[Example], share: float) -> TorchDecoder:
    """The model with `share` of its hidden width removed, in both phases; weights are shared.

    Raises Unsupported for Gemma 2 and 3, whose norms behind each branch no rotation passes through.
    """
    if model.config.branch_norms:
        raise Unsupported("SliceGPT cannot slice a model with norms behind its branches (Gemma 2 and 3)")
    num_kept = model.config.shape.hidden_size - round(share * model.config.shape.hidden_size)
    made = model.with_layers(range(model.num_layers))
    body = made.model
    sliced = [_SlicedLayer(cast(DecoderLayer, layer), num_kept) for layer in body.layers]
    body.layers = nn.ModuleList(sliced)
    body.embed_tokens = nn.Sequential(body.embed_tokens, _Slicer(num_kept))  # type: ignore[assignment]
    with torch.inference_mode():
        made(calibration_batch(model, examples))  # its prefill tokens come first in every layer and fix each basis
    return made
