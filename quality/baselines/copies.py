"""Copies of a model whose layers may be changed while embedding and head stay shared. Changes nothing itself."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.quality.torch_model import Batch, Example, TorchDecoder, make_batch
from shoal.visibility import Visibility, VisibilityKind


def with_own_layers(model: TorchDecoder) -> TorchDecoder:
    """A model of the same weights; its layers' tensors are its own, everything else is shared."""
    made = model.with_layers(range(model.num_layers))
    made.model.layers = nn.ModuleList(copy.deepcopy(layer) for layer in model.model.layers)
    return made


def linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Every linear map inside a module, by its dotted name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}


def calibration_batch(model: TorchDecoder, examples: Sequence[Example]) -> Batch:
    """Whole sequences as prefill tokens but the last; all examples cut to the shortest, so that nothing is padding. On the
    model's device."""
    length = min(example.num_tokens for example in examples)
    whole = [Example((*example.prompt_ids, *example.response_ids)[:length], ()) for example in examples]
    batch = make_batch(whole, Visibility(VisibilityKind.FULL, boundary_tokens=1))
    return batch.to(next(model.parameters()).device)


def column_norms(model: TorchDecoder, batch: Batch) -> dict[str, Tensor]:
    """Root of the summed squares of each input feature of each linear map of the layers, over the batch's tokens."""
    sums: dict[str, Tensor] = {}
    hooks = []
    for name, linear in linears(model.model.layers).items():

        def add(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
            squares = inputs[0].float().square().sum((0, 1))
            sums[name] = sums[name] + squares if name in sums else squares

        hooks.append(linear.register_forward_pre_hook(add))
    try:
        with torch.inference_mode():
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: total.sqrt() for name, total in sums.items()}
