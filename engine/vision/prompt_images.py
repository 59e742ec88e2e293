"""The images of one prompt as its layers meet them: positions, who sees whom, and features in place of embeddings.

Knows spans and features; knows no pixels. A worker that runs no image token (decode) has the spans alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import InternalError
from shoal.model_files import VisionConfig
from shoal.types import ImageSpan


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What the vision tower makes of one image."""

    embeddings: torch.Tensor  # [n, h] in place of the tokens' own; never scaled
    deep: tuple[torch.Tensor, ...] = ()  # [n, h], to be added to the hidden states behind decoder layers 0, 1, …


@dataclass(frozen=True, slots=True)
class PromptImages:
    """Made by `of`. Positions are the prompt's, as everywhere."""

    spans: tuple[ImageSpan, ...]  # in order
    is_bidirectional: bool  # Gemma 3: an image's tokens see each other, later ones too
    num_deep_layers: int
    features: tuple[ImageFeatures | None, ...]  # of each image; None: its tokens do not run here

    @classmethod
    def of(
        cls, vision: VisionConfig | None, spans: Sequence[ImageSpan], features: Sequence[ImageFeatures | None] = ()
    ) -> Self | None:
        """None for a prompt without images."""
        if not spans:
            return None
        if vision is None:
            raise InternalError("images in a prompt for a model that sees none")
        own = tuple(features) or (None,) * len(spans)
        return cls(tuple(spans), vision.is_bidirectional, vision.num_deep_layers, own)

    @property
    def whole(self) -> tuple[range, ...]:
        """Positions that must run in one chunk up to their end."""
        return tuple(span.positions for span in self.spans) if self.is_bidirectional else ()

    def pieces(self, positions: range) -> Iterator[tuple[range, bool]]:
        """Cut at the borders of bidirectional images: (positions, whether they are causal)."""
        at = positions.start
        for span in self.whole:
            if span.stop <= at:
                continue
            if span.start >= positions.stop:
                break
            if at < span.start:
                yield range(at, span.start), True
            if span.stop > positions.stop:
                raise InternalError(f"an image at {span} was cut at {positions.stop}")
            yield range(max(at, span.start), span.stop), False
            at = span.stop
        if at < positions.stop:
            yield range(at, positions.stop), True

    def rotary_positions(self, positions: range) -> NDArray[np.int64]:
        """By what time, height and width each position turns (M-RoPE): [3, n]. Text behind an image goes on from the largest of
        its positions, so that it turns by less than its own position.
        """
        turned = np.tile(np.arange(positions.start, positions.stop), (3, 1))
        num_saved = 0  # tokens of the images so far, less the positions they take
        for span in self.spans:
            if span.grid is None:
                continue
            _, rows, columns = span.grid
            first, last = (min(max(at, positions.start), positions.stop) for at in (span.start, span.stop))
            index, base = np.arange(first, last) - span.start, span.start - num_saved
            own = base + np.stack([index // (rows * columns), index // columns % rows, index % columns])
            turned[:, first - positions.start : last - positions.start] = own
            num_saved += span.num_tokens - max(span.grid)
            behind = max(0, span.stop - positions.start)
            turned[:, behind:] = np.arange(positions.start + behind, max(positions.start + behind, positions.stop)) - num_saved
        return turned

    @property
    def has_grids(self) -> bool:
        """Whether positions differ from the prompt's own."""
        return any(span.grid is not None for span in self.spans)

    def rows(self, positions: range) -> Iterator[tuple[slice, slice, ImageFeatures]]:
        """Image tokens among these positions: (which of them, which rows of the features, the features)."""
        for span, features in zip(self.spans, self.features, strict=True):
            first, last = max(span.start, positions.start), min(span.stop, positions.stop)
            if first >= last:
                continue
            if features is None:
                raise InternalError(f"the image at {span.start}…{span.stop - 1} was to be run without its features")
            yield (
                slice(first - positions.start, last - positions.start),
                slice(first - span.start, last - span.start),
                features,
            )
