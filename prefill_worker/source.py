"""Where sent plan entries come from: KV out of the task's slots, deep states out of their store. Knows no transport.

`pack` runs in a transfer thread, on slots whose tokens have been computed and which no later step writes.
"""

import torch

from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import RequestKv
from shoal.engine.state_store import StateStore
from shoal.errors import InternalError
from shoal.placement.plan import Entry, EntryKind


class PrefillSource:
    """The source of one attempt."""

    def __init__(self, pool: KvPool, kv: RequestKv, states: StateStore | None) -> None:
        self._pool = pool
        self._kv = kv
        self._states = states

    def pack(self, entry: Entry, out: torch.Tensor) -> None:
        """Copy an entry's payload into `out` (uint8, [num_bytes])."""
        if entry.kind is EntryKind.KV:
            table = self._kv.lower if self._kv.is_lower(entry.layer) else self._kv.upper
            self._pool.pack(table, entry.layer, entry.start, entry.stop, out)  # what crosses has slot = position
        elif self._states is None:
            raise InternalError(f"a deep state entry is due from a task that keeps none ({self._kv.layout.visibility})")
        else:
            self._states.read_into(entry.start, entry.stop, out.view(self._pool.data.dtype))
