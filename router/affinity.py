"""Which workers have lately run prompts that begin alike: what a router remembers of whom it sent where. Knows digests and keys.

It is a guess: a worker may have given the KV up since, or have got it from another router's requests. The guess only makes a
worker look less busy by the work it would save (placement/balance.py), so a wrong one costs no more than that.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from shoal.placement.prefix_keys import PrefixChain, cache_key, prefix_root
from shoal.router.legs import DispatchRequest

Key = tuple[str, int]  # of a worker: id and epoch

_CHUNK: Final = 64  # tokens
_MAX_CHUNKS: Final = 64  # of one prompt
_CAPACITY: Final = 16_384  # chunks
_MAX_WORKERS: Final = 4  # of one chunk, the latest


class PrefixMemory:
    """Bounded; the least recently seen beginnings are forgotten first."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[bytes, tuple[Key, ...]] = OrderedDict()

    def digests(self, request: DispatchRequest, num_layers: int) -> list[bytes]:
        """Of the request's beginning, chunk by chunk; as cached prefixes, they differ by visibility, tenant and salt."""
        if request.num_prefill_tokens < _CHUNK:
            return []
        salt = cache_key(request.turn.tenant, request.cache_salt)
        prompt = request.prompt_ids[: min(request.num_prefill_tokens, _CHUNK * _MAX_CHUNKS)]
        root, images = prefix_root("", "", request.visibility, num_layers, salt), [image.span for image in request.images]
        return PrefixChain(root, _CHUNK, prompt, images).digests

    def held(self, digests: Sequence[bytes]) -> dict[Key, int]:
        """Tokens from the beginning on that each worker has probably kept."""
        found: dict[Key, int] = {}
        for index, digest in enumerate(digests):
            for key in self._seen.get(digest, ()):
                if found.get(key, 0) == index * _CHUNK:
                    found[key] = (index + 1) * _CHUNK
        return found

    def sent(self, digests: Sequence[bytes], keys: Iterable[Key]) -> None:
        """These workers run it."""
        keys = tuple(keys)
        for digest in reversed(digests):
            others = (key for key in self._seen.pop(digest, ()) if key not in keys)
            self._seen[digest] = (*keys, *others)[: max(_MAX_WORKERS, len(keys))]
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
