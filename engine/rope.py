"""The rotary embedding over the whole head: dimensions i and i + d/2 turn together. Knows positions, no cache."""

from dataclasses import dataclass

import torch

from shoal.model_files import DecoderConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of some rows, ready to broadcast over heads."""

    cos: torch.Tensor  # [n, 1, head_dim / 2]
    sin: torch.Tensor  # [n, 1, head_dim / 2]

    def __getitem__(self, rows: torch.Tensor) -> "Rotation":
        """The rotation of a selection of rows."""
        return Rotation(self.cos[rows], self.sin[rows])

    def apply_(self, heads: torch.Tensor) -> None:
        """Turn heads [n, num_heads, head_dim] in place."""
        first, second = heads.chunk(2, dim=-1)
        turned = first * self.cos - second * self.sin
        second.mul_(self.cos).add_(first * self.sin)
        first.copy_(turned)


@dataclass(frozen=True, slots=True)
class Rotations:
    """The rotation of some rows in layers that see everything and in window layers: often the same one."""

    everywhere: Rotation
    in_windows: Rotation

    @classmethod
    def same(cls, rotation: Rotation) -> "Rotations":
        """One for all layers."""
        return cls(rotation, rotation)

    def __getitem__(self, rows: torch.Tensor) -> "Rotations":
        """The rotations of a selection of rows."""
        own = self.everywhere[rows]
        return Rotations(own, own if self.in_windows is self.everywhere else self.in_windows[rows])

    def of(self, window: int | None) -> Rotation:
        """For a layer with this window."""
        return self.everywhere if window is None else self.in_windows


@dataclass(frozen=True, slots=True)
class Frequencies:
    """A model's inverse frequencies, on its device."""

    everywhere: torch.Tensor  # [head_dim / 2] float32
    in_windows: torch.Tensor | None  # None: the same
    axes: torch.Tensor | None = None  # [head_dim / 2] by time (0), height (1) or width (2) of three positions; M-RoPE

    @classmethod
    def of(cls, config: DecoderConfig, device: torch.device | str = "cpu") -> "Frequencies":
        """Both of a model's rotary embeddings, or its only one."""
        head_dim, local = config.shape.head_dim, config.local_rope
        own = inverse_frequencies(config.rope, head_dim, device)
        axes = None if config.mrope_section is None else mrope_axes(config.mrope_section, head_dim // 2, device)
        return cls(own, None if local is None else inverse_frequencies(local, head_dim, device), axes)

    def rotations(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotations:
        """Of rows at `positions` [n], or [3, n] in time, height and width."""
        if positions.dim() == 2 and self.axes is not None:
            return Rotations.same(rotation(positions[self.axes].t().unsqueeze(1), self.everywhere, dtype))
        own = rotation(positions[:, None, None], self.everywhere, dtype)
        return Rotations(own, own if self.in_windows is None else rotation(positions[:, None, None], self.in_windows, dtype))


def inverse_frequencies(config: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """θ^(−2i/d), divided by the configuration's factor of each pair: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / config.theta**exponents / torch.tensor(config.frequency_factors(head_dim), device=device)


def mrope_axes(section: tuple[int, int, int], num_pairs: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Which of a row's three positions each pair turns by, interleaved: [num_pairs]."""
    axes = torch.zeros(num_pairs, dtype=torch.int64, device=device)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


def rotation(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation of rows at `positions` [n, 1, 1 or pairs]; angles in float32, results in `dtype`."""
    angles = positions.to(torch.float32) * frequencies
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
