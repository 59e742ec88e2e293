"""Where sent plan entries come from: KV out of the task's slots, deep states out of their store. Knows no transport.

`pack` runs in a transfer thread, on slots whose tokens have been computed and which no later step writes.
"""

import torch

from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import RequestKv
from shoal.engine.state_store import StateStore
from shoal.errors import InternalError
from shoal.placement.plan import Entry, EntryKind
from shoal.placement.tables import BlockTable


class PrefillSource:
    """The source of one attempt. A transfer is opened before its task has blocks; nothing is packed before `hold`."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._kv: RequestKv | None = None
        self._states: StateStore | None = None

    def hold(self, kv: RequestKv, states: StateStore | None) -> None:
        """The task has its blocks."""
        self._kv, self._states = kv, states

    def pack(self, entry: Entry, out: torch.Tensor) -> None:
        """Copy an entry's payload into `out` (uint8, [num_bytes])."""
        kv = self._held()
        if entry.kind is EntryKind.KV:
            table = kv.lower if kv.is_lower(entry.layer) else kv.upper
            self._pool.pack(table, entry.layer, entry.start, entry.stop, out)  # what crosses has slot = position
        else:
            self._kept().read_into(entry.start, entry.stop, out.view(self._pool.data.dtype))

    def tables(self) -> tuple[BlockTable, BlockTable]:
        """The task's block tables, of lower and of upper layers."""
        kv = self._held()
        return kv.lower, kv.upper

    def states(self) -> StateStore | None:
        """Where its deep states are kept."""
        return self._states

    def _held(self) -> RequestKv:
        if self._kv is None:
            raise InternalError("an entry is due from a task that has no blocks yet")
        return self._kv

    def _kept(self) -> StateStore:
        if self._states is None:
            raise InternalError(f"a deep state entry is due from a task that keeps none ({self._held().layout.visibility})")
        return self._states
