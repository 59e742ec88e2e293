"""Other ways to save, for comparison with shallow prefill: dropped layers, sliced widths, pruned and rounded weights."""

from shoal.quality.baselines.block_influence import block_influence, without_least_influential
from shoal.quality.baselines.int8 import layers_of, rounded_layers, rounded_model
from shoal.quality.baselines.slicegpt import sliced_model
from shoal.quality.baselines.wanda import pruned_model

__all__ = [
    "block_influence",
    "layers_of",
    "pruned_model",
    "rounded_layers",
    "rounded_model",
    "sliced_model",
    "without_least_influential",
]
