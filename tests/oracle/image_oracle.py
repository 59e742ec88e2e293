"""The mask-level program with images in the prompt: features and positions as transformers' whole model computes them."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.engine_support import TextHalf
from tests.oracle.mask_oracle import MaskOracle


class ImageOracle(MaskOracle):
    """`inputs`: what the family's image processor in transformers makes of the images. Knows no span and nothing of ours."""

    @torch.inference_mode()
    def __init__(self, half: TextHalf, image_token_id: int, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__(half)  # type: ignore[arg-type]
        self._whole, self._image_token_id, self._inputs = half.whole.model, image_token_id, inputs
        self._is_gemma = self.model.config.model_type == "gemma3_text"
        seen: Any = self._whole.get_image_features(**inputs)
        features = seen.pooler_output
        self._features = features.flatten(0, 1) if torch.is_tensor(features) else torch.cat(features)
        self._deep = [torch.cat(feature) for feature in getattr(seen, "deepstack_features", None) or []]

    def _embed(self, token_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([token_ids])
        self._is_image = ids[0] == self._image_token_id
        number = (self._is_image & ~torch.cat([torch.tensor([False]), self._is_image[:-1]])).cumsum(0)
        self._image_of = torch.where(self._is_image, number, -torch.arange(len(token_ids)) - 1)
        self._positions = torch.arange(len(token_ids)).expand(3, 1, -1)
        if not self._is_gemma:
            grid = self._inputs["image_grid_thw"]
            self._positions = self._whole.get_rope_index(ids, self._is_image.int()[None], image_grid_thw=grid)[0]
        hidden = super()._embed(token_ids).clone()
        hidden[:, self._is_image] = self._features
        return hidden

    def _see_each_other(self, positions: torch.Tensor) -> torch.Tensor:
        if not self._is_gemma:
            return super()._see_each_other(positions)
        own = self._image_of[positions]
        return own[:, None] == own[None, :]

    def _turned(self, positions: torch.Tensor) -> torch.Tensor:
        return positions[None] if self._is_gemma else self._positions[:, :, positions]

    def _layer(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, num_sinks: int) -> torch.Tensor:
        hidden = super()._layer(layer, hidden, positions, num_sinks)
        if layer < len(self._deep) and len(positions) == len(self._is_image):
            hidden = hidden.clone()
            hidden[:, self._is_image] += self._deep[layer]
        return hidden

    @torch.inference_mode()
    def whole_scores(self, half: TextHalf, token_ids: Sequence[int]) -> torch.Tensor:
        """transformers' own forward pass over the same: log-probabilities [tokens, vocab]."""
        ids = torch.tensor([list(token_ids)])
        kind = "token_type_ids" if self._is_gemma else "mm_token_type_ids"
        logits = half.whole(input_ids=ids, **self._inputs, **{kind: (ids == self._image_token_id).long()}).logits
        scores: torch.Tensor = logits[0].log_softmax(-1)
        return scores
