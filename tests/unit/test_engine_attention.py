"""The attention back ends against attention written out one query at a time, by position."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.engine.attention import attention_backend
from shoal.engine.query_runs import QueryRun, SlotGeometry
from shoal.errors import InvalidConfig
from shoal.types import ModelShape
from tests import engine_support as support

HEADS, KV_HEADS, D, BLOCK, NUM_BLOCKS, LAYERS = 6, 2, 8, 4, 120, 2
SHAPE = ModelShape(
    num_layers=2,
    hidden_size=8,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=D,
    intermediate_size=8,
    vocab_size=9,
    max_context=64,
)


def position(slot: int, geometry: SlotGeometry) -> int:
    return slot if slot < geometry.num_anchors else slot + geometry.gap


def by_hand(q: torch.Tensor, data: torch.Tensor, run: QueryRun, row: int, layer: int, window: int | None) -> torch.Tensor:
    """One query's output [heads, d]."""
    own = run.start_slot + row
    keys = []
    for slot in range((own if run.is_causal else run.num_slots - 1) + 1):
        distance = position(own, run.geometry) - position(slot, run.geometry)
        if window is None or distance < window or (run.geometry.sink and slot < run.geometry.num_anchors):
            keys.append((int(run.block_ids[layer, slot // BLOCK]), slot % BLOCK))
    out = torch.empty(HEADS, D)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        k = torch.stack([data[block, 0, kv_head, offset] for block, offset in keys])
        v = torch.stack([data[block, 1, kv_head, offset] for block, offset in keys])
        out[head] = (k @ q[head] / math.sqrt(D)).softmax(0) @ v
    return out


def random_runs(rng: random.Random) -> list[QueryRun]:
    """Rows over disjoint blocks: prompts, chunks further in, one-token rows of similar and very different lengths."""
    ids = np.array(rng.sample(range(NUM_BLOCKS), NUM_BLOCKS), dtype=np.int32).reshape(LAYERS, -1)
    runs, first_row, used = [], 0, 0
    for _ in range(rng.randint(1, 7)):
        num_rows = rng.choice([1, 1, 1, 2, 5, 9])
        start = rng.choice([0, rng.randint(1, 6), rng.randint(7, 40)])
        num_anchors = rng.choice([0, 1, 3])
        geometry = SlotGeometry(num_anchors, rng.choice([0, 2, 30]), rng.random() < 0.4)
        num_blocks = -(-(start + num_rows) // BLOCK)
        if used + num_blocks > ids.shape[1]:
            break
        is_causal = num_rows == 1 or rng.random() < 0.6
        geometry = geometry if is_causal else SlotGeometry()  # images stand in lower layers alone
        runs.append(QueryRun(first_row, num_rows, start, ids[:, used : used + num_blocks], geometry, is_causal))
        first_row, used = first_row + num_rows, used + num_blocks
    return runs


@pytest.mark.parametrize("name", support.BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 3, 12])
@pytest.mark.parametrize("seed", range(12))
def test_equals_attention_by_hand(name: str, window: int | None, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    runs = random_runs(rng)
    data = torch.randn(NUM_BLOCKS, 2, KV_HEADS, BLOCK, D)
    num_rows = sum(run.num_rows for run in runs)
    q = torch.randn(num_rows, HEADS, D)
    rows = data.view(-1, D)
    prepared = attention_backend(name).prepare(runs, window, SHAPE, rows, BLOCK)
    for layer in range(LAYERS):
        fresh = torch.empty(num_rows, 2, KV_HEADS, D)  # what the pool holds of these rows
        for run in runs:
            for row in range(run.num_rows):
                slot = run.start_slot + row
                fresh[run.first_row + row] = data[run.block_ids[layer, slot // BLOCK], :, :, slot % BLOCK]
        out = prepared.attend(q, fresh, rows, layer)
        for run in runs:
            for row in range(run.num_rows):
                index = run.first_row + row
                assert torch.allclose(out[index], by_hand(q[index], data, run, row, layer, window), atol=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("window", [None, 100, 1024])
@pytest.mark.skipif(bool(support.NATIVE_MISSING), reason=support.NATIVE_MISSING)
def test_images_of_their_real_size(window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    """256 tokens that see each other, at the start, across the kernels' blocks of keys and far in; beside rows of text."""
    torch.manual_seed(1)
    shape, block, num_blocks = replace(SHAPE, num_heads=4, num_kv_heads=2, head_dim=64), 16, 300
    data = torch.randn(num_blocks, 2, 2, block, 64).to(dtype)
    runs, first_row, used = [], 0, 0
    for num_rows, start in ((256, 0), (256, 37), (256, 1000), (3, 700), (1, 90), (70, 256)):
        ids = np.arange(used, used + -(-(start + num_rows) // block), dtype=np.int32).reshape(1, -1)
        runs.append(QueryRun(first_row, num_rows, start, ids, SlotGeometry(), is_causal=num_rows == 70))
        first_row, used = first_row + num_rows, used + ids.shape[1]
    assert used <= num_blocks
    q, rows = torch.randn(first_row, 4, 64).to(dtype), data.view(-1, 64)
    fresh = torch.cat(
        [
            data[torch.from_numpy(run.block_ids[0].astype(np.int64))]
            .permute(0, 3, 1, 2, 4)
            .reshape(-1, 2, 2, 64)[run.start_slot : run.num_slots]
            for run in runs
        ]
    )
    outputs = [
        attention_backend(name).prepare(runs, window, shape, rows, block).attend(q, fresh, rows, 0)
        for name in ("torch", "native")
    ]
    assert (outputs[0].float() - outputs[1].float()).abs().max() < tolerance


@pytest.mark.parametrize("name", support.BACKENDS)
@pytest.mark.parametrize("window", [None, 3])
def test_reads_only_slots_that_exist(name: str, window: int | None) -> None:
    """Everything outside the runs' slots is NaN: other requests' blocks, slots not written yet, slots behind the window."""
    torch.manual_seed(0)
    data = torch.full((NUM_BLOCKS, 2, KV_HEADS, BLOCK, D), float("nan"))
    ids = np.arange(1, 2 * 13 + 1, dtype=np.int32).reshape(2, 13)  # of two layers; block 0 belongs to somebody else
    geometry = SlotGeometry()
    runs = [
        QueryRun(0, 1, 19, ids[:, :5], geometry),
        QueryRun(1, 1, 9, ids[:, 5:9], geometry),
        QueryRun(2, 3, 6, ids[:, 9:], geometry),
    ]
    for run in runs:
        for slot in range(run.first_visible_slot(window), run.num_slots):
            data[run.block_ids[:, slot // BLOCK], :, :, slot % BLOCK] = torch.randn(2, 2, KV_HEADS, D)
    q, rows, fresh = torch.randn(5, HEADS, D), data.view(-1, D), torch.zeros(5, 2, KV_HEADS, D)
    out = attention_backend(name).prepare(runs, window, SHAPE, rows, BLOCK).attend(q, fresh, rows, 1)
    for run in runs:
        for row in range(run.num_rows):
            index = run.first_row + row
            assert torch.allclose(out[index], by_hand(q[index], data, run, row, 1, window), atol=1e-5)


def test_first_visible_slot_is_the_lowest_seen_by_any_row() -> None:
    for seed in range(200):
        for run in random_runs(random.Random(seed)):
            for window in (None, 1, 3, 12):
                seen = [
                    slot
                    for slot in range(run.start_slot + 1)
                    if window is None
                    or position(run.start_slot, run.geometry) - position(slot, run.geometry) < window
                    or (run.geometry.sink and slot < run.geometry.num_anchors)
                ]
                lowest = run.first_visible_slot(window)
                assert lowest == min(seen) or (run.geometry.sink and lowest == 0)


def test_unknown_back_end_is_named() -> None:
    with pytest.raises(InvalidConfig, match="unknown attention back end 'flash'; known: native, torch"):
        attention_backend("flash")
