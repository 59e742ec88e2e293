"""Wanda (arXiv 2306.11695): in every row of every linear map, zero the weights of least |weight| · norm of its input feature.

Unstructured, norms from one pass of the whole model (the paper's pass goes through layers that are pruned already). It saves
nothing without kernels for sparse weights.
"""

from collections.abc import Sequence

import torch

from shoal.quality.baselines.copies import calibration_batch, column_norms, linears, with_own_layers
from shoal.quality.torch_model import Example, TorchDecoder


@torch.no_grad()
def pruned_model(model: TorchDecoder, examples: Sequence[Example], share: float) -> TorchDecoder:
    """A copy with `share` of each layer's weights zeroed, for both phases."""
    norms = column_norms(model, calibration_batch(model, examples))
    made = with_own_layers(model)
    for name, linear in linears(made.model.layers).items():
        scores = linear.weight.abs() * norms[name]
        num_zeroed = int(share * scores.shape[1])
        lowest = scores.topk(num_zeroed, dim=1, largest=False).indices
        linear.weight.scatter_(1, lowest, 0.0)
    return made
