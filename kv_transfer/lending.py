"""The handoff within one machine: decode reads prefill's KV where it lies. Knows pools, places and leases; knows no streams.

Nothing is packed, summed or sent at prefill, so the core that computes has nothing to do for a transfer but to name blocks.
Decode copies them on its own core. Its answer `Go` says that it has read; a transfer that ends before takes its lease back
first and only then its blocks, so that what is read too late is never believed.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from shoal.engine.kv_pool import KvPool, block_bytes
from shoal.engine.shared_memory import Lease, MappedMemory, Offer, SharedMemory
from shoal.engine.state_store import StateStore
from shoal.errors import InternalError, Mismatch, Unavailable
from shoal.pb.internal.v1 import transfer_pb2 as pb
from shoal.placement.blocks import NO_BLOCK, BlockIds
from shoal.placement.plan import Entry, EntryKind
from shoal.placement.tables import BlockTable
from shoal.types import Fingerprint, ModelShape


class Lends(Protocol):
    """A source that can say where it lies."""

    def tables(self) -> Sequence[BlockTable]:
        """Its block tables, of lower and of upper layers."""
        ...

    def states(self) -> StateStore | None: ...


def offered(memory: SharedMemory) -> pb.SharedPool:
    """What Hello says of the sender's pool."""
    offer = memory.offer
    return pb.SharedPool(pid=offer.pid, descriptor=offer.descriptor, num_bytes=offer.num_bytes, secret=offer.secret)


def lent(lease: Lease, source: Lends) -> pb.Lent:
    """What an attempt's first Ready says of all its entries. Raises what the source raises."""
    lower, upper = (
        pb.BlockIds(first_layer=table.layers.start, num_rows=len(table.layers), ids=_to_wire(table.ids))
        for table in source.tables()
    )
    message = pb.Lent(slot=lease.slot, number=lease.number, lower=lower, upper=upper)
    if (states := source.states()) is not None:
        message.states.CopyFrom(pb.BlockIds(num_rows=1, ids=_to_wire(states.block_ids)))
        message.first_state = states.positions.start
    return message


class Loan:
    """Where one attempt's entries lie in a borrowed pool."""

    def __init__(self, message: pb.Lent, pool: KvPool) -> None:
        """Raises Mismatch for what cannot be."""
        self.lease = Lease(message.slot, message.number)
        self._pool = pool
        self._tables = [_table(rows, pool) for rows in (message.lower, message.upper)]
        ids, size = _from_wire(message.states, pool)[0], pool.shape.hidden_size
        if NO_BLOCK in ids:
            raise Mismatch("prefill lends deep states that lie in no block")
        num_states = len(ids) * pool.data[0].numel() // size
        self._states = StateStore(pool, ids, range(message.first_state, message.first_state + num_states), size)

    def read(self, entry: Entry, out: torch.Tensor) -> None:
        """Copy an entry into `out` [entry.num_bytes] uint8, in its wire layout. Raises Mismatch when it has no such place."""
        try:
            if entry.kind is EntryKind.DEEP_STATE:
                self._states.read_into(entry.start, entry.stop, out.view(self._pool.data.dtype))
                return
            table = next(table for table in self._tables if entry.layer in table.layers)
            self._pool.pack(table, entry.layer, entry.start, entry.stop, out)  # what crosses has slot = position
        except (StopIteration, ValueError, InternalError):
            raise Mismatch(f"entry {entry.index} does not lie where prefill says that it does") from None


class Borrower:
    """One prefill worker's pool, as a decode worker reads it. Used by a thread of the pair."""

    def __init__(self, pool: pb.SharedPool, shape: ModelShape, fingerprint: Fingerprint) -> None:
        """Raises Mismatch when the memory cannot be read here, or is no pool of this shape."""
        size = block_bytes(shape, fingerprint.block_size, fingerprint.dtype)
        if pool.num_bytes % size:
            raise Mismatch(f"prefill offers {pool.num_bytes} bytes of KV, which is no number of blocks of {size} bytes")
        self._memory = MappedMemory(Offer(pool.pid, pool.descriptor, pool.num_bytes, pool.secret))
        self._pool = KvPool(shape, pool.num_bytes // size, fingerprint.block_size, fingerprint.dtype, memory=self._memory.data)

    def loan(self, message: pb.Lent) -> Loan:
        """Where an attempt's entries lie. Raises Mismatch."""
        return Loan(message, self._pool)

    def read(self, loan: Loan, entry: Entry, memory: torch.Tensor) -> torch.Tensor:
        """Copy an entry to the beginning of `memory` uint8; that part, [entry.num_bytes], in the entry's wire layout.

        Raises Unavailable when prefill has taken its blocks back meanwhile, Mismatch for an entry that cannot lie there.
        """
        part = memory[: entry.num_bytes]
        loan.read(entry, part)
        if not self._memory.holds(loan.lease):
            raise Unavailable("the prefill worker took its blocks back before they had been read; retry the request")
        return part


def _to_wire(ids: BlockIds) -> bytes:
    return np.ascontiguousarray(ids, "<i4").tobytes()


def _from_wire(rows: pb.BlockIds, pool: KvPool) -> BlockIds:
    """[num_rows, n]. Raises Mismatch."""
    num_rows = max(1, rows.num_rows)
    if len(rows.ids) % (4 * num_rows):
        raise Mismatch(f"prefill lends a block table of {len(rows.ids)} bytes in {num_rows} rows")
    ids: BlockIds = np.frombuffer(rows.ids, "<i4").astype(np.int32).reshape(num_rows, -1)
    if ids.size and (ids.min() < NO_BLOCK or ids.max() >= pool.num_blocks):
        raise Mismatch("prefill lends blocks that its pool does not have")
    return ids


def _table(rows: pb.BlockIds, pool: KvPool) -> BlockTable:
    table = BlockTable(range(rows.first_layer, rows.first_layer + rows.num_rows), pool.block_size)
    if rows.num_rows:
        table.extend(_from_wire(rows, pool).reshape(-1))
    return table
