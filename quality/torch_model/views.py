"""Who sees whom in a batch: masks by position and rotations, made once for all layers that share them. Knows no weights."""

from functools import cache
from typing import Final

import torch
from torch import Tensor

from shoal.engine.rope import Frequencies
from shoal.quality.torch_model.batch import Batch

_NO_WINDOW: Final = 1 << 40


class Views:
    """Masks and rotations of a range of layers: all of them, or with `above` those above K under `speed`."""

    def __init__(
        self, batch: Batch, frequencies: Frequencies, windows: tuple[int | None, ...], num_kept: Tensor | None = None
    ) -> None:
        """`num_kept` [B]: how many prefill tokens still exist, the first ones; None = all."""
        self._frequencies, self._windows, self._sink = frequencies, windows, batch.visibility.sink and num_kept is not None
        self._kept = batch.num_prefill if num_kept is None else num_kept  # [B]
        self.num_prefill = int(self._kept.max())  # P' of these layers
        device = batch.prefill_ids.device
        self._prefill_positions = torch.arange(self.num_prefill, device=device)[None]  # [1, P']
        self._decode_positions = batch.decode_positions  # [B, D]
        self._rotaries = cache(self._make_rotaries)
        self._masks = cache(self._make_masks)

    def above(self, batch: Batch) -> "Views":
        """The views above K under `speed`: of the prefill tokens only anchors exist."""
        return Views(batch, self._frequencies, self._windows, batch.num_anchors)

    def prefill_rotary(self, layer: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the prefill tokens, [1, P', 1, d / 2]."""
        return self._rotaries(self._window(layer) is not None)[0]

    def decode_rotary(self, layer: int) -> tuple[Tensor, Tensor]:
        """And of the decode tokens, [B, D, 1, d / 2]."""
        return self._rotaries(self._window(layer) is not None)[1]

    def _window(self, layer: int) -> int | None:
        return self._windows[layer] if self._windows else None

    def prefill_mask(self, layer: int) -> Tensor | None:
        """[1, 1, P', P'] for prefill tokens among themselves, or None where plain causal order says it all (padding comes
        last, so no token that counts sees it)."""
        window = self._window(layer)
        return None if window is None or window >= self.num_prefill or self._sink else self._masks(window)[0]

    def decode_mask(self, layer: int) -> Tensor:
        """[B, 1, D, P' + D]: prefill tokens that exist, and decode tokens not later, within the layer's window."""
        return self._masks(self._window(layer))[1]

    def _make_masks(self, window: int | None) -> tuple[Tensor, Tensor]:
        prefill, decode, width = self._prefill_positions, self._decode_positions, window or _NO_WINDOW
        distance = prefill[:, :, None] - prefill[:, None, :]
        among_prefill = (distance >= 0) & (distance < width)
        exists = prefill < self._kept[:, None]  # [B, P']
        near = self._sink | (decode[:, :, None] - prefill[:, None, :] < width)
        distance = decode[:, :, None] - decode[:, None, :]
        among_decode = (distance >= 0) & (distance < width)
        seen = torch.cat([exists[:, None, :] & near, among_decode], dim=2)
        return among_prefill[:, None], seen[:, None]

    def _make_rotaries(self, in_window: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        frequencies = self._frequencies.everywhere
        if in_window and self._frequencies.in_windows is not None:
            frequencies = self._frequencies.in_windows
        return _turn(self._prefill_positions, frequencies), _turn(self._decode_positions, frequencies)


def _turn(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, :, None, None] * frequencies  # [B, n, 1, d / 2]
    return angles.cos(), angles.sin()
