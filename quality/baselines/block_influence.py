"""ShortGPT (arXiv 2403.03853): drop the layers that turn their input least, in both phases."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from shoal.quality.baselines.copies import calibration_batch
from shoal.quality.torch_model import Example, LayerTrace, TorchDecoder


def block_influence(model: TorchDecoder, examples: Sequence[Example]) -> list[float]:
    """1 − mean cosine of what enters and what leaves each layer, over all tokens of the examples."""
    found: list[float] = []

    def look(trace: LayerTrace) -> None:
        before = [trace.decode_in] + ([] if trace.prefill_in is None else [trace.prefill_in])
        after = [trace.decode_out] + ([] if trace.prefill_out is None else [trace.prefill_out])
        cosines = F.cosine_similarity(torch.cat(before, 1).float(), torch.cat(after, 1).float(), dim=-1)
        found.append(1 - float(cosines.mean()))

    with torch.inference_mode():
        model(calibration_batch(model, examples), trace=look)
    return found


def without_least_influential(model: TorchDecoder, examples: Sequence[Example], num_kept: int) -> tuple[TorchDecoder, list[int]]:
    """The model of the `num_kept` most influential layers in their order, and the layers that were dropped."""
    influence = block_influence(model, examples)
    ranked = sorted(range(len(influence)), key=lambda layer: influence[layer], reverse=True)
    kept = sorted(ranked[:num_kept])
    return model.with_layers(kept), sorted(ranked[num_kept:])
