"""What a cached prefix is called: a chain of digests over whole blocks of tokens (design §2). Knows tokens, no blocks, no KV.

The first digest is of the identity: model revision, adapter, kind of visibility, K, a, sink and the salt. Each later one is of
the digest before it and the tokens of one block. So equal digests mean equal tokens from the prompt's first one on, under the
same identity; b and late are not part of it, and what one salt has cached, another can neither use nor find out. Tokens that
stand for an image all have one id: a block that holds some of them is named by the image's own digest too.
"""

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from shoal.errors import InvalidRequest
from shoal.types import ModelShape
from shoal.types.images import ImageSpan
from shoal.visibility import Visibility, VisibilityKind

MAX_SALT_CHARACTERS: Final = 256
_DIGEST_BYTES: Final = 32


class PrefixChain:
    """The digests of one sequence's whole blocks, made as far as they are asked for."""

    def __init__(self, root: bytes, block_size: int, token_ids: Sequence[int] = (), images: Sequence[ImageSpan] = ()) -> None:
        """`root` is `prefix_root` of what the sequence runs under; `images` are those in it, in order."""
        self.root = root
        self.block_size = block_size
        self._images = tuple(images)
        self.digests: list[bytes] = []
        self._rest: list[int] = []  # the tokens of a block that is not whole yet
        self.extend(token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens given so far."""
        return len(self.digests) * self.block_size + len(self._rest)

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these tokens."""
        self._rest.extend(token_ids)
        data, size = array("I", self._rest).tobytes(), array("I").itemsize * self.block_size
        digest = self.digests[-1] if self.digests else self.root
        for start in range(0, len(data) - size + 1, size):
            first = len(self.digests) * self.block_size
            shown = _images_within(self._images, first, first + self.block_size) if self._images else b""
            digest = hashlib.blake2b(digest + data[start : start + size] + shown, digest_size=_DIGEST_BYTES).digest()
            self.digests.append(digest)
        del self._rest[: len(self._rest) // self.block_size * self.block_size]

    def fork(self) -> "PrefixChain":
        """A chain of its own that goes on from here."""
        twin = PrefixChain(self.root, self.block_size, images=self._images)
        twin.digests, twin._rest = list(self.digests), list(self._rest)
        return twin


@lru_cache(maxsize=1024)
def prefix_root(revision: str, adapter: str, visibility: Visibility, num_layers: int, salt: str) -> bytes:
    """The identity's digest, under a resolved visibility (K = L is `full` by then)."""
    depth = visibility.depth(num_layers)
    parts = (revision, adapter, visibility.kind, str(depth), str(visibility.anchor_tokens), str(visibility.sink), salt)
    text = b"".join(len(data).to_bytes(4, "little") + data for data in (part.encode() for part in parts))
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"shoal prefix").digest()


def cache_key(tenant: str, cache_salt: str) -> str:
    """The salt of a request: its tenant, and within the tenant what the request itself names. Raises InvalidRequest."""
    if len(cache_salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequest(f"cache_salt has {len(cache_salt)} characters; use at most {MAX_SALT_CHARACTERS}")
    return f"{len(tenant)}:{tenant}{cache_salt}"


def anchors_digest(root: bytes, anchor_ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> bytes:
    """What the anchors' own part of a cached prefix is called: it depends on the anchors alone, and images among them."""
    data = array("I", anchor_ids).tobytes() + _images_within(images, 0, len(anchor_ids))
    return hashlib.blake2b(root + data, digest_size=_DIGEST_BYTES, person=b"shoal anchors").digest()


def _images_within(images: Sequence[ImageSpan], start: int, stop: int) -> bytes:
    """What tells tokens start … stop − 1 from the same ids that stand for other images, or for other parts of them."""
    found = (image for image in images if image.start < stop and image.stop > start)
    return b"".join(
        image.digest + (start - image.start).to_bytes(8, "little", signed=True) + image.num_tokens.to_bytes(4, "little")
        for image in found
    )


def prefix_windows(shape: ModelShape, visibility: Visibility) -> tuple[int, ...]:
    """The sliding windows, each once, of the layers in which prefill tokens leave KV."""
    num_layers = visibility.depth(shape.num_layers) if visibility.kind is VisibilityKind.SPEED else shape.num_layers
    return tuple(sorted({w for layer in range(num_layers) if (w := shape.window(layer)) is not None}))
