"""Memory lent to another process: found, checked, read only, and believed only while its lease holds."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.kv_pool import KvPool, block_bytes
from shoal.engine.shared_memory import Lease, MappedMemory, Offer, SharedMemory
from shoal.engine.state_store import StateStore
from shoal.errors import InvalidConfig, Mismatch, Unavailable
from shoal.kv_transfer.lending import Borrower, lent, offered
from shoal.pb.internal.v1 import transfer_pb2 as pb
from shoal.placement.blocks import NO_BLOCK
from shoal.placement.plan import Entry, EntryKind
from shoal.placement.tables import BlockTable
from shoal.types import DType, Fingerprint, ModelShape

SHAPE = ModelShape(num_layers=3, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=8, vocab_size=32,
                   max_context=64)  # fmt: skip
BLOCK, NUM_BLOCKS = 4, 40
FINGERPRINT = Fingerprint("r", "", 3, 8, 1, 4, DType.FLOAT32, BLOCK, "rope", 1 << 16, 64)


class Source:
    """A task's blocks."""

    def __init__(self, pool: KvPool) -> None:
        self.lower, self.upper = BlockTable(range(2), BLOCK), BlockTable(range(2, 3), BLOCK)
        self.lower.extend(np.array([[5, 9, 2], [7, 1, 30]], np.int32).reshape(-1))
        self.kept = StateStore(pool, np.array([11, 12], np.int32), range(3, 9), SHAPE.hidden_size)

    def tables(self) -> tuple[BlockTable, BlockTable]:
        return self.lower, self.upper

    def states(self) -> StateStore:
        return self.kept


@pytest.fixture
def lender() -> Iterator[tuple[SharedMemory, KvPool, Source]]:
    memory = SharedMemory(NUM_BLOCKS * block_bytes(SHAPE, BLOCK, DType.FLOAT32))
    pool = KvPool(SHAPE, NUM_BLOCKS, BLOCK, DType.FLOAT32, memory=memory.data)
    pool.data.copy_(torch.arange(pool.data.numel(), dtype=torch.float32).view(pool.data.shape))
    yield memory, pool, Source(pool)


def kv(index: int, layer: int, start: int, stop: int) -> Entry:
    return Entry(index, EntryKind.KV, layer, start, stop, (stop - start) * SHAPE.kv_elements * 4)


def test_what_is_read_is_what_packing_would_have_sent(lender: tuple[SharedMemory, KvPool, Source]) -> None:
    memory, pool, source = lender
    entries = [kv(0, 0, 1, 7), kv(1, 1, 0, 12), Entry(2, EntryKind.DEEP_STATE, 2, 4, 6, 2 * SHAPE.hidden_size * 4)]
    borrower = Borrower(offered(memory), SHAPE, FINGERPRINT)
    loan, scratch = borrower.loan(lent(memory.lease(), source)), torch.zeros(1 << 12, dtype=torch.uint8)
    for entry in entries:
        part = torch.zeros(entry.num_bytes, dtype=torch.uint8)
        if entry.kind is EntryKind.KV:
            pool.pack(source.lower, entry.layer, entry.start, entry.stop, part)
        else:
            source.kept.read_into(entry.start, entry.stop, part.view(torch.float32))
        assert torch.equal(borrower.read(loan, entry, scratch), part) and part.any()


def test_nothing_is_believed_once_the_lease_has_ended(lender: tuple[SharedMemory, KvPool, Source]) -> None:
    memory, _, source = lender
    borrower, message = Borrower(offered(memory), SHAPE, FINGERPRINT), torch.zeros(kv(0, 0, 0, 4).num_bytes, dtype=torch.uint8)
    leases = [memory.lease() for _ in range(3)]
    loans = [borrower.loan(lent(lease, source)) for lease in leases]
    memory.end(leases[1])
    memory.end(leases[1])
    assert memory.num_leases == 2
    borrower.read(loans[0], kv(0, 0, 0, 4), message)
    with pytest.raises(Unavailable, match="took its blocks back"):
        borrower.read(loans[1], kv(0, 0, 0, 4), message)
    again = memory.lease()  # the same slot, another lease
    assert again.slot == leases[1].slot and again.number != leases[1].number
    with pytest.raises(Unavailable, match="took its blocks back"):
        borrower.read(loans[1], kv(0, 0, 0, 4), message)
    borrower.read(borrower.loan(lent(again, source)), kv(0, 0, 0, 4), message)


@pytest.mark.parametrize("lease", [Lease(0, 0), Lease(1 << 16, 1), Lease((1 << 32) - 1, 1), Lease(9, 1 << 60)])
def test_a_lease_that_was_never_given_does_not_hold(lender: tuple[SharedMemory, KvPool, Source], lease: Lease) -> None:
    memory, *_ = lender
    memory.lease()
    assert not MappedMemory(memory.offer).holds(lease)


def test_only_the_very_memory_that_was_offered_is_mapped(lender: tuple[SharedMemory, KvPool, Source], tmp_path: object) -> None:
    offer = lender[0].offer
    plain = os.open(f"{tmp_path}/file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(plain, (2 << 20) + offer.num_bytes)
    queue = os.pipe()
    for wrong, words in (
        (replace(offer, secret=bytes(32)), "another process's"),
        (replace(offer, secret=b""), "another process's"),
        (replace(offer, num_bytes=offer.num_bytes - 1), "bytes, not"),
        (replace(offer, num_bytes=0), "bytes, not"),
        (replace(offer, descriptor=9999), "No such file"),
        (replace(offer, pid=(1 << 22) + 1), "No such file"),
        (replace(offer, descriptor=plain), ""),  # could shrink under its reader
        (replace(offer, descriptor=queue[0]), "not sealed"),
    ):
        with pytest.raises(Mismatch, match="one machine, as one user") as refused:
            MappedMemory(wrong)
        assert words in str(refused.value)
    for descriptor in (plain, *queue):
        os.close(descriptor)
    MappedMemory(offer)


def test_deep_states_in_no_block_are_refused(lender: tuple[SharedMemory, KvPool, Source]) -> None:
    memory, _, source = lender
    message = lent(memory.lease(), source)
    message.states.ids = np.array([11, NO_BLOCK], "<i4").tobytes()
    with pytest.raises(Mismatch, match="in no block"):
        Borrower(offered(memory), SHAPE, FINGERPRINT).loan(message)


def test_another_shape_of_pool_is_refused(lender: tuple[SharedMemory, KvPool, Source]) -> None:
    with pytest.raises(Mismatch, match="no number of blocks"):
        Borrower(offered(lender[0]), replace(SHAPE, head_dim=12), FINGERPRINT)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_whatever_is_said_to_be_lent_is_read_or_refused(data: st.DataObject) -> None:
    memory = SharedMemory(NUM_BLOCKS * block_bytes(SHAPE, BLOCK, DType.FLOAT32))
    borrower = Borrower(offered(memory), SHAPE, FINGERPRINT)
    rows = st.builds(
        pb.BlockIds,
        first_layer=st.integers(0, 4) | st.integers(0, (1 << 32) - 1),
        num_rows=st.integers(0, 4) | st.integers(0, (1 << 32) - 1),
        ids=st.lists(st.integers(-2, NUM_BLOCKS) | st.integers(-(1 << 31), (1 << 31) - 1), max_size=12).map(
            lambda ids: np.array(ids, "<i4").tobytes()
        )
        | st.binary(max_size=9),
    )
    message = pb.Lent(
        slot=0, number=memory.lease().number, lower=data.draw(rows), upper=data.draw(rows), states=data.draw(rows),
        first_state=data.draw(st.integers(0, 12) | st.integers(0, (1 << 32) - 1)),
    )  # fmt: skip
    start = data.draw(st.integers(0, 20))
    stop = start + data.draw(st.integers(1, 9))
    kind = data.draw(st.sampled_from(EntryKind))
    size = SHAPE.kv_elements if kind is EntryKind.KV else SHAPE.hidden_size
    entry = Entry(0, kind, data.draw(st.integers(0, 3)), start, stop, (stop - start) * size * 4)
    with contextlib.suppress(Mismatch):
        borrower.read(borrower.loan(message), entry, torch.zeros(entry.num_bytes, dtype=torch.uint8))


def _read_and_write(connection: Connection, offer: Offer) -> None:
    mapped = MappedMemory(offer)
    connection.send(mapped.data[:4].tolist())
    connection.recv()
    connection.send(mapped.data[:4].tolist())
    mapped.data[0] = 9  # kills this process: the mapping is read-only
    connection.send("alive")


def test_another_process_sees_writes_and_cannot_write() -> None:
    memory = SharedMemory(4096)
    memory.data[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read_and_write, args=(theirs, memory.offer))
    reader.start()
    theirs.close()
    assert ours.recv() == [1, 2, 3, 4]
    memory.data[0] = 7
    ours.send(None)
    assert ours.recv() == [7, 2, 3, 4]
    reader.join(30)
    assert reader.exitcode == -signal.SIGSEGV and memory.data[0] == 7
    with pytest.raises(EOFError):
        ours.recv()


@pytest.mark.parametrize("num_bytes", [2 * psutil.virtual_memory().total, 1 << 62, 1 << 64])
def test_more_than_any_machine_has_is_refused_with_words(num_bytes: int) -> None:
    with pytest.raises(InvalidConfig, match=r"GB of shared memory cannot be had: .*; lower kv_memory"):
        SharedMemory(num_bytes)


def test_owner_and_readers_have_large_pages_under_them() -> None:
    def large_bytes() -> int:
        with open("/proc/self/smaps_rollup") as rollup:
            return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("ShmemPmdMapped"))

    before, size = large_bytes(), 32 << 20
    memory = SharedMemory(size)
    if not memory.has_large_pages:
        pytest.skip("this kernel gathers no large pages, or has none in one piece")
    memory.data[::4096] = 3
    assert large_bytes() >= before + size
    reader = MappedMemory(memory.offer)
    assert int(reader.data.sum()) == 3 * size // 4096
    assert large_bytes() >= before + 2 * size


def test_a_kernel_without_large_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.mapped_file._MADV_COLLAPSE", 9999)  # what it does not know
    memory = SharedMemory(8 << 20)
    memory.data[-1] = 5
    assert not memory.has_large_pages and int(MappedMemory(memory.offer).data.sum()) == 5


def test_memory_goes_with_its_owner_and_readers() -> None:
    def num_mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:shoal-kv" in line for line in maps)

    before, descriptors = num_mappings(), len(os.listdir("/proc/self/fd"))
    memory = SharedMemory(1 << 20)
    reader = MappedMemory(memory.offer)
    assert num_mappings() == before + 2
    del memory
    assert num_mappings() == before + 1 and int(reader.data.sum()) == 0
    del reader
    assert num_mappings() == before and len(os.listdir("/proc/self/fd")) == descriptors
