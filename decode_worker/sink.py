"""Where received plan entries go: KV into the request's slots, deep states into their store. Knows no transport and no weights.

`unpack` runs in a transfer thread, on slots no step touches before the request is ready. The transfer calls it no more once
it has ended or been cancelled, so the blocks may then be given back.
"""

from collections.abc import Callable

import torch

from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import RequestKv
from shoal.engine.state_store import StateStore
from shoal.errors import InternalError
from shoal.placement.plan import Entry, EntryKind


class DecodeSink:
    """The sink of one attempt. `arrived` is told of each entry after it is in place, from the transfer thread."""

    def __init__(self, pool: KvPool, kv: RequestKv, states: StateStore | None, arrived: Callable[[Entry], None]) -> None:
        self._pool = pool
        self._kv = kv
        self._states = states
        self._arrived = arrived

    def unpack(self, entry: Entry, data: torch.Tensor) -> None:
        """Copy an entry's payload (uint8, [num_bytes]) to where it belongs."""
        if entry.kind is EntryKind.KV:
            table = self._kv.lower if self._kv.is_lower(entry.layer) else self._kv.upper
            self._pool.unpack(table, entry.layer, entry.start, entry.stop, data)  # what crosses has slot = position
        elif self._states is None:
            raise InternalError(f"a deep state entry came for a request that keeps none ({self._kv.layout.visibility})")
        else:
            self._states.write(entry.start, data.view(self._pool.data.dtype).view(entry.num_tokens, -1))
        self._arrived(entry)
