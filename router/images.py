"""The images of a public request: what they may take, and what the model makes of them. Reads headers; decodes no pixels."""

from collections.abc import Sequence
from typing import Final

from shoal.config.images import ImageLimits
from shoal.errors import InvalidRequest, Unsupported
from shoal.model_files import VisionConfig, check_images, read_image_header
from shoal.pb.v1 import shoal_pb2
from shoal.router.validation import check_prompt_length
from shoal.types import PromptImage
from shoal.visibility import Visibility

FORMATS: Final = "PNG, JPEG, WebP or GIF"


class ImageCheck:
    """Limits of the operator and the model. Cheap: a header for each image, nothing is copied."""

    def __init__(self, vision: VisionConfig | None, limits: ImageLimits, num_layers: int) -> None:
        self.vision = vision if limits.max_images else None  # None: none are taken
        self.limits = limits
        self._sees_images = vision is not None
        self._num_layers = num_layers

    def files(self, images: Sequence[shoal_pb2.Image], max_context: int) -> tuple[bytes, ...]:
        """The files, each within its limits and all together within the context.

        Raises Unsupported where none are taken, InvalidRequest that names the image, what it has and the limit.
        """
        if not images:
            return ()
        if self.vision is None:
            who = "server takes" if self._sees_images else "model sees"
            raise Unsupported(f"this {who} no images; send text alone")
        limits, sizes = self.limits, [len(image.data) for image in images]
        if len(images) > limits.max_images:
            raise InvalidRequest(f"the request has {len(images)} images; send at most {limits.max_images}")
        for index, size in enumerate(sizes):
            if not size:
                raise InvalidRequest(f"image {index} is empty; send the bytes of a {FORMATS} file")
            if size > limits.max_image_bytes:
                raise InvalidRequest(f"image {index} has {size} bytes; send at most {limits.max_image_bytes}")
        if sum(sizes) > limits.max_total_bytes:
            raise InvalidRequest(f"the images have {sum(sizes)} bytes together; send at most {limits.max_total_bytes}")
        num_tokens = sum(self._num_tokens(index, image.data, self.vision) for index, image in enumerate(images))
        check_prompt_length(num_tokens, max_context, at_least=True)
        return tuple(image.data for image in images)

    def _num_tokens(self, index: int, data: bytes, vision: VisionConfig) -> int:
        try:
            header = read_image_header(data)
            if header.width * header.height > self.limits.max_pixels:
                raise InvalidRequest(
                    f"an image of {header.width} × {header.height} pixels is too large; at most {self.limits.max_pixels} pixels "
                    "are taken, make it smaller"
                )
            return vision.num_tokens(header.width, header.height)
        except InvalidRequest as error:
            raise InvalidRequest(f"image {index}: {error}") from None

    def placement(
        self, images: Sequence[PromptImage], prompt_ids: Sequence[int], visibility: Visibility, *, scores_prompt: bool = False
    ) -> None:
        """Whether prefill can run all of the images under a resolved visibility. Raises InvalidRequest, Unsupported."""
        if not images:
            return
        if scores_prompt:
            raise Unsupported("prompt_logprobs run the whole prompt on decode, which sees no images; leave one of them out")
        split = visibility.split(len(prompt_ids))
        check_images(
            self.vision,
            prompt_ids,
            [image.span for image in images],
            num_prefill_tokens=split.num_prefill_tokens,
            num_anchor_tokens=split.num_anchor_tokens,
            prefill_layers=visibility.depth(self._num_layers),
        )
