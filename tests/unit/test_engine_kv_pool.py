"""The KV tensor and its wire layout: slots [n, 2, kv_heads, head_dim], whatever blocks they lie in."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.engine.kv_pool import KvPool, block_bytes
from shoal.errors import InternalError, InvalidConfig
from shoal.placement.blocks import NO_BLOCK
from shoal.placement.tables import BlockTable
from shoal.types import DType, ModelShape

SHAPE = ModelShape(
    num_layers=3, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=8, vocab_size=9, max_context=64
)
DTYPES = [DType.FLOAT32, DType.BFLOAT16]


def table(layers: range, num_blocks: int, block_size: int, first: int = 0, *, in_order: bool = False) -> BlockTable:
    """Blocks anywhere, or neighbours but for one gap."""
    own = BlockTable(layers, block_size)
    ids = np.random.default_rng(first).permutation(len(layers) * num_blocks).astype(np.int32) + first
    if in_order:
        ids = np.sort(ids)
        ids[len(ids) - 2 :] += 1
    own.extend(ids)
    return own


def filled(pool: KvPool, own: BlockTable, layer: int, num_slots: int) -> torch.Tensor:
    """Write random KV slot by slot; returns it as [slots, 2, kv_heads, head_dim]."""
    kv = torch.randn(num_slots, 2, 2, 4).to(pool.data.dtype)
    slots = np.arange(num_slots)
    blocks = torch.from_numpy(own.layer_ids(layer)[slots // own.block_size].astype(np.int64))
    pool.write(kv, blocks, torch.from_numpy(slots % own.block_size))
    return kv


def test_a_pool_that_no_machine_can_hold_is_refused_with_words() -> None:
    with pytest.raises(InvalidConfig, match=r"a KV pool of \d+\.\d GB cannot be allocated on cpu; lower kv_memory_bytes"):
        KvPool(SHAPE, 1 << 45, 16, DType.FLOAT32)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_and_unpack_between_pools_of_different_block_size(dtype: DType, in_order: bool, by_kernel: bool) -> None:
    source, sink = KvPool(SHAPE, 40, 4, dtype), KvPool(SHAPE, 30, 8, dtype)
    if not by_kernel:
        source.kernels = sink.kernels = None
    elif source.kernels is None:
        pytest.skip("the kernels cannot run here")
    mine, theirs = table(range(3), 7, 4, in_order=in_order), table(range(1, 3), 4, 8, first=5, in_order=in_order)
    kv = filled(source, mine, 2, 26)
    for start, stop in [(0, 26), (3, 4), (5, 19), (8, 16), (7, 7), (9, 11), (6, 24), (4, 26)]:
        sink.data.zero_()
        wire = torch.zeros((stop - start) * 16 * dtype.num_bytes + 8, dtype=torch.uint8)
        source.pack(mine, 2, start, stop, wire[:-8])
        assert torch.equal(wire[:-8].view(kv.dtype).view(-1, 2, 2, 4), kv[start:stop]) and not wire[-8:].any()
        sink.unpack(theirs, 2, start, stop, wire[:-8])
        for slot in range(start, stop):
            block = theirs.layer_ids(2)[slot // 8]
            assert torch.equal(sink.data[block, :, :, slot % 8], kv[slot])
        assert int(sink.data.count_nonzero()) == int(kv[start:stop].count_nonzero())  # and nothing else


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])  # rows of whole cache lines are written past the caches, others not
def test_entries_larger_than_a_cache(head_dim: int) -> None:
    shape = replace(SHAPE, head_dim=head_dim)
    source, sink = KvPool(shape, 3 * 400, 16, DType.BFLOAT16), KvPool(shape, 3 * 200, 32, DType.BFLOAT16)
    if source.kernels is None:
        pytest.skip("the kernels cannot run here")
    source.data.normal_()
    mine, theirs = table(range(3), 400, 16), table(range(3), 200, 32)
    start, stop = 5, 6391
    wire, back = (torch.zeros((stop - start) * 8 * head_dim, dtype=torch.uint8) for _ in range(2))
    source.pack(mine, 1, start, stop, wire)
    assert wire.numel() > 1 << 20
    sink.unpack(theirs, 1, start, stop, wire)
    sink.kernels = None  # so that another way reads what was written
    sink.pack(theirs, 1, start, stop, back)
    assert torch.equal(wire, back) and int(sink.data.count_nonzero()) == int(wire.view(torch.bfloat16).count_nonzero())


@pytest.mark.parametrize("by_kernel", [False, True])
def test_wrong_buffers_and_slots_are_refused(by_kernel: bool) -> None:
    pool, own = KvPool(SHAPE, 40, 4, DType.FLOAT32), table(range(3), 2, 4)
    if not by_kernel:
        pool.kernels = None
    for buffer in (torch.zeros(63, dtype=torch.uint8), torch.zeros(65, dtype=torch.uint8), torch.zeros(16)):
        with pytest.raises(InternalError, match="KV entry of 64 bytes does not fit"):
            pool.pack(own, 0, 0, 1, buffer)
        with pytest.raises(InternalError, match="KV entry of 64 bytes does not fit"):
            pool.unpack(own, 0, 0, 1, buffer)
    with pytest.raises(InternalError, match="outside a table of 8"):
        pool.pack(own, 0, 7, 9, torch.zeros(128, dtype=torch.uint8))
    own.ids[0, 0] = NO_BLOCK
    for pooled in (pool, KvPool(replace(SHAPE, head_dim=3), 40, 4, DType.FLOAT32)):  # rows of 12 bytes are not copied in runs
        pooled.kernels = pool.kernels
        buffer = torch.zeros(4 * 4 * pooled.shape.head_dim * 4, dtype=torch.uint8)
        for copy in (pooled.pack, pooled.unpack):
            with pytest.raises(InternalError, match="not all held"):
                copy(own, 0, 2, 6, buffer)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(dtype: DType) -> None:
    pool = KvPool(SHAPE, 40, 4, dtype)
    assert pool.num_bytes == 40 * block_bytes(SHAPE, 4, dtype) == 40 * 4 * 16 * dtype.num_bytes
    assert not pool.data.any()
