"""Images within prompts, as they cross room borders. Knows where their tokens stand; decodes nothing."""

import hashlib
from dataclasses import dataclass, field

from shoal.errors import InvalidRequest

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The tokens of one image among a prompt's ids, and which image it is. Raises InvalidRequest for what cannot be."""

    start: int  # position of its first token
    num_tokens: int
    digest: bytes  # SHA-256 of the image's file
    grid: tuple[int, int, int] | None = None  # time, height, width in tokens, where positions depend on it (M-RoPE)

    def __post_init__(self) -> None:
        if self.start < 0 or self.num_tokens < 1:
            raise InvalidRequest(f"an image of {self.num_tokens} tokens at position {self.start} cannot be")
        if len(self.digest) != DIGEST_BYTES:
            raise InvalidRequest(f"an image's digest has {DIGEST_BYTES} bytes, not {len(self.digest)}")
        if self.grid is not None and (min(self.grid) < 1 or self.grid[0] * self.grid[1] * self.grid[2] != self.num_tokens):
            raise InvalidRequest(f"a grid of {self.grid} does not hold {self.num_tokens} tokens")

    @property
    def stop(self) -> int:
        """The position behind its last token."""
        return self.start + self.num_tokens

    @property
    def positions(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image's file, PNG, JPEG, WebP or GIF, and where it stands. Only prefill needs the file."""

    data: bytes = field(repr=False)
    span: ImageSpan


def image_digest(data: bytes) -> bytes:
    """What tells images apart, in spans and prefix caches."""
    return hashlib.sha256(data).digest()
