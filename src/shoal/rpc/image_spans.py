"""Images' places on the wire. Knows both spellings, decides nothing."""

from collections.abc import Iterable

from shoal.errors import InvalidRequest
from shoal.pb.internal.v1 import worker_pb2
from shoal.types import ImageSpan, PromptImage


def span_to_pb(span: ImageSpan) -> worker_pb2.ImageSpan:
    """The same fields."""
    return worker_pb2.ImageSpan(start=span.start, num_tokens=span.num_tokens, digest=span.digest, grid=span.grid or ())


def span_from_pb(message: worker_pb2.ImageSpan) -> ImageSpan:
    """Raises InvalidRequest for what no image can be."""
    grid = tuple(message.grid)
    if len(grid) not in (0, 3):
        raise InvalidRequest(f"an image's grid has 3 numbers or none, not {len(grid)}")
    return ImageSpan(message.start, message.num_tokens, message.digest, (grid[0], grid[1], grid[2]) if grid else None)


def image_to_pb(image: PromptImage) -> worker_pb2.PromptImage:
    """With its file: for prefill alone."""
    return worker_pb2.PromptImage(span=span_to_pb(image.span), data=image.data)


def spans_from_pb(messages: Iterable[worker_pb2.ImageSpan]) -> tuple[ImageSpan, ...]:
    """What decode is told. Raises InvalidRequest."""
    return tuple(span_from_pb(message) for message in messages)


def images_from_pb(messages: Iterable[worker_pb2.PromptImage]) -> tuple[PromptImage, ...]:
    """What prefill is told. Raises InvalidRequest."""
    return tuple(PromptImage(message.data, span_from_pb(message.span)) for message in messages)
