"""How much the images of one request may take. Knows no format and no model; router/images.py applies it."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from shoal.errors import InvalidConfig

MAX_IMAGE_MB: Final = 20.0  # workers refuse larger ones themselves
MAX_IMAGE_MEGAPIXELS: Final = 40.0
_MOST: Final = {  # a gRPC message has 256 MiB
    "max_image_mb": MAX_IMAGE_MB,
    "max_images_mb": 200.0,
    "max_image_megapixels": MAX_IMAGE_MEGAPIXELS,
}


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Checked before anything is done with an image. Raises InvalidConfig for values that mean nothing."""

    max_images: int = 16  # of one request; 0: none are taken
    max_image_mb: float = MAX_IMAGE_MB  # of one file; MB are 10^6 bytes
    max_images_mb: float = 64.0  # of all files of a request
    max_image_megapixels: float = MAX_IMAGE_MEGAPIXELS  # of one image: 10^6 pixels

    def __post_init__(self) -> None:
        if self.max_images < 0:
            raise InvalidConfig(f"max_images must be 0 (none) or more, not {self.max_images}")
        for name in ("max_image_mb", "max_images_mb", "max_image_megapixels"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidConfig(f"{name} must be a number greater than 0, not {getattr(self, name)}")
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise InvalidConfig(f"{name} must be at most {most:g}, what workers and messages take, not {getattr(self, name)}")

    @property
    def max_image_bytes(self) -> int:
        return int(self.max_image_mb * 1e6)

    @property
    def max_total_bytes(self) -> int:
        return int(self.max_images_mb * 1e6)

    @property
    def max_pixels(self) -> int:
        return int(self.max_image_megapixels * 1e6)

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """From settings of the same names; others are left alone. Raises InvalidConfig."""
        return cls(**{field.name: settings[field.name] for field in dataclasses.fields(cls)})
