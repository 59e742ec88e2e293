"""Images of requests to features, one image at a time in a thread of its own; what was seen lately is kept. Knows no batches.

A step never waits for an image to be decoded, and of all that wait only one image's pixels are in memory.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from shoal.engine.vision.prompt_images import ImageFeatures
from shoal.engine.vision.tower import VisionTower
from shoal.errors import InvalidRequest
from shoal.model_files import read_image_header
from shoal.types import PromptImage
from shoal.types.images import image_digest

_KEPT_BYTES: Final = 256 << 20


class VisionEncoder:
    """One per worker. `encode` may be called by one thread at a time, `encode_soon` from the event loop."""

    def __init__(
        self,
        tower: VisionTower,
        num_threads: int = 1,
        kept_bytes: int = _KEPT_BYTES,
        seen: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """`seen` is told how long each image took that had to be seen, in whatever thread."""
        self.config = tower.config
        self._seen = seen
        self._tower = tower
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[tuple[str, bytes], ImageFeatures] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="vision", initializer=torch.set_num_threads, initargs=(num_threads,)
        )

    async def encode_soon(self, images: Sequence[PromptImage], salt: str = "") -> tuple[ImageFeatures, ...]:
        """See `encode`. Others' images may come between; for a caller who has left, the image at hand is given up."""
        loop, left = asyncio.get_running_loop(), threading.Event()
        try:
            run, encode = loop.run_in_executor, self._encode
            return tuple([await run(self._thread, encode, index, image, salt, left) for index, image in enumerate(images)])
        finally:
            left.set()

    def encode(self, images: Sequence[PromptImage], salt: str = "") -> tuple[ImageFeatures, ...]:
        """Features of images in order; what one salt has left, another does not find. Raises InvalidRequest that says which one
        is damaged, or is not the one that its span names."""
        never = threading.Event()
        return tuple(self._encode(index, image, salt, never) for index, image in enumerate(images))

    def close(self) -> None:
        """End the thread, after the image it is at."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _encode(self, index: int, image: PromptImage, salt: str, left: threading.Event) -> ImageFeatures:
        try:
            return self._features(image, salt, left)
        except InvalidRequest as error:
            raise InvalidRequest(f"image {index}: {error}") from error

    def _features(self, image: PromptImage, salt: str, left: threading.Event) -> ImageFeatures:
        if image_digest(image.data) != image.span.digest:
            raise InvalidRequest("an image's digest is not that of its bytes; send the SHA-256 of the file")
        header, span = read_image_header(image.data), image.span
        size = header.width, header.height
        if (num_tokens := self.config.num_tokens(*size)) != span.num_tokens or self.config.grid(*size) != span.grid:
            raise InvalidRequest(f"an image of {size} pixels takes {num_tokens} tokens here, its prompt has {span.num_tokens}")
        key = salt, image.span.digest
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return found
        started = time.monotonic()
        features = self._tower.encode(image.data, lambda: not left.is_set())
        self._seen(time.monotonic() - started)
        self._kept[key] = features
        self._num_bytes += _size(features)
        while self._num_bytes > self._kept_bytes:
            self._num_bytes -= _size(self._kept.popitem(last=False)[1])
        return features


def _size(features: ImageFeatures) -> int:
    return sum(tensor.nbytes for tensor in (features.embeddings, *features.deep))
