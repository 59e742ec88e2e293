"""One full-depth pass whose states every visibility of the same weights branches from. Knows streams; scores nothing.

Below layer K every visibility computes what `full` computes (design §2), so a curve over K costs one pass over the prompts, and
for each point the decode tokens' upper layers alone.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from shoal.quality.torch_model import Batch, LayerTrace, Start, TorchDecoder


@dataclass(frozen=True, slots=True)
class Trunk:
    """What enters each layer, whole sequences side by side, and the last layer's normed decode states."""

    states: tuple[Tensor, ...]  # per layer [B, T, h], prompt then response
    hidden: Tensor  # [B, D, h] of the batch it was run with

    @classmethod
    @torch.inference_mode()
    def run(cls, model: TorchDecoder, batch: Batch) -> Self:
        """`batch` under `full`."""
        length = int((batch.num_prefill + batch.num_decode).max())
        states: list[Tensor] = []

        def keep(trace: LayerTrace) -> None:
            whole = trace.decode_in.new_zeros(len(batch.decode_ids), length, trace.decode_in.shape[2])
            if trace.prefill_in is not None:
                whole[:, : trace.prefill_in.shape[1]] = trace.prefill_in
            for row, (first, count) in enumerate(zip(batch.num_prefill.tolist(), batch.num_decode.tolist(), strict=True)):
                whole[row, first : first + count] = trace.decode_in[row, :count]
            states.append(whole)

        hidden = model(batch, trace=keep)
        return cls(tuple(states), hidden)

    def start(self, batch: Batch, layer: int) -> Start:
        """What enters `layer` of the same examples, divided as another batch's boundary divides them."""
        whole = self.states[layer]
        places = batch.decode_positions.clamp(max=whole.shape[1] - 1)  # padding repeats the last
        decode = whole.gather(1, places[:, :, None].expand(-1, -1, whole.shape[2]))
        return Start(layer, whole[:, : batch.prefill_ids.shape[1]], decode)
