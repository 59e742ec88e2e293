"""Attention by torch's scaled_dot_product_attention. Knows runs and the pool's rows; copies paged KV before it attends.

Three shapes of work: a run that starts at slot 0 attends to the rows just computed; a longer run further in gathers its
slots; one-token runs of many requests are gathered together, padded to the longest of a group of similar lengths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from shoal.engine.query_runs import QueryRun, visible
from shoal.types import ModelShape

_MAX_GROUP_SLOTS = 1 << 16  # keys gathered at once for a group of one-token runs


@dataclass(frozen=True, slots=True)
class _FreshRun:
    """A run whose keys are its own rows."""

    rows: slice
    mask: torch.Tensor | None  # [n, n], None = causal

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        q, k, v = (x[self.rows].transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, n, d]
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.mask is None, enable_gqa=True)
        out[self.rows] = result[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _PagedKeys:
    """Where the keys of b runs lie in the pool, for every layer of a stage."""

    bases: torch.Tensor  # [layers, b, blocks] pool row where each block begins
    offsets: torch.Tensor  # [2, 1, kv_heads, 1, block_size] pool rows of a block, from its base
    num_keys: int  # of the longest run; shorter ones are padded and masked

    def gather(self, pool_rows: torch.Tensor, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [b, kv_heads, num_keys, d], in one copy."""
        index = self.bases[layer_index][None, :, None, :, None] + self.offsets
        kv = pool_rows.index_select(0, index.view(-1)).view(2, index.shape[1], index.shape[2], -1, pool_rows.shape[1])
        return kv[0, :, :, : self.num_keys], kv[1, :, :, : self.num_keys]


@dataclass(frozen=True, slots=True)
class _PagedRun:
    """One run of several rows over gathered keys."""

    rows: slice
    keys: _PagedKeys
    mask: torch.Tensor  # [1, n, num_keys], additive

    def attend(self, q: torch.Tensor, pool_rows: torch.Tensor, layer_index: int, out: torch.Tensor) -> None:
        k, v = self.keys.gather(pool_rows, layer_index)
        queries = q[self.rows].transpose(0, 1).unsqueeze(0)  # [1, heads, n, d]
        result = F.scaled_dot_product_attention(queries, k, v, attn_mask=self.mask, enable_gqa=True)
        out[self.rows] = result[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _PagedRows:
    """One-token runs over gathered keys; the heads that share KV are folded into the query dimension."""

    rows: torch.Tensor  # [b]
    keys: _PagedKeys
    mask: torch.Tensor | None  # [b, 1, 1, num_keys], additive

    def attend(self, q: torch.Tensor, pool_rows: torch.Tensor, layer_index: int, out: torch.Tensor) -> None:
        k, v = self.keys.gather(pool_rows, layer_index)
        folded = q[self.rows].view(k.shape[0], k.shape[1], -1, q.shape[-1])  # [b, kv_heads, groups, d]
        result = F.scaled_dot_product_attention(folded, k, v, attn_mask=self.mask)
        out[self.rows] = result.reshape(-1, *q.shape[1:])


class TorchAttentionStage:
    """One stage's attention; see PreparedAttention."""

    def __init__(self, fresh: list[_FreshRun], paged: Sequence[_PagedRun | _PagedRows]) -> None:
        self._fresh = fresh
        self._paged = paged

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool_rows: torch.Tensor, layer_index: int
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for run in self._fresh:
            run.attend(q, k, v, out)
        for runs in self._paged:
            runs.attend(q, pool_rows, layer_index, out)
        return out


class TorchAttention:
    """The back end "torch"; see AttentionBackend."""

    def prepare(
        self, runs: Sequence[QueryRun], window: int | None, shape: ModelShape, pool_rows: torch.Tensor, block_size: int
    ) -> TorchAttentionStage:
        fresh: list[_FreshRun] = []
        paged: list[_PagedRun | _PagedRows] = []
        single: list[QueryRun] = []
        heads = shape.num_kv_heads
        offsets = torch.arange(2 * heads * block_size, device=pool_rows.device).view(2, 1, heads, 1, block_size)
        for run in runs:
            rows = slice(run.first_row, run.first_row + run.num_rows)
            if run.start_slot == 0:
                masked = run.needs_mask_beyond_causal(window)
                mask = _additive(visible([run], [0], run.num_rows, window)[0], pool_rows) if masked else None
                fresh.append(_FreshRun(rows, mask))
            elif run.num_rows == 1:
                single.append(run)
            else:
                keys, seen = _page([run], window, offsets)
                paged.append(_PagedRun(rows, keys, _additive(seen, pool_rows)))
        for group in _groups(single):
            keys, seen = _page(group, window, offsets)
            mask = None if bool(seen.all()) else _additive(seen.unsqueeze(1), pool_rows)
            index = torch.tensor([run.first_row for run in group], device=pool_rows.device)
            paged.append(_PagedRows(index, keys, mask))
        return TorchAttentionStage(fresh, paged)


def _groups(runs: list[QueryRun]) -> Iterator[list[QueryRun]]:
    """Cut one-token runs into groups in which padding at most doubles the work."""
    group: list[QueryRun] = []
    for run in sorted(runs, key=lambda run: -run.num_slots):
        if group and (2 * run.num_slots < group[0].num_slots or (len(group) + 1) * group[0].num_slots > _MAX_GROUP_SLOTS):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _page(runs: list[QueryRun], window: int | None, offsets: torch.Tensor) -> tuple[_PagedKeys, torch.Tensor]:
    """The keys that some row of the runs sees, from a block's beginning on, and who sees whom: bool [b, n, num_keys]."""
    kv_heads, block_size = offsets.shape[2], offsets.shape[4]
    first_blocks = [run.first_visible_slot(window) // block_size for run in runs]
    num_keys = max(run.num_slots - first * block_size for run, first in zip(runs, first_blocks, strict=True))
    shape = (len(runs[0].block_ids), len(runs), -(-num_keys // block_size))
    bases = np.zeros(shape, dtype=np.int64)  # padding reads block 0, and is masked
    for index, (run, first) in enumerate(zip(runs, first_blocks, strict=True)):
        ids = run.block_ids[:, first : -(-run.num_slots // block_size)]
        bases[:, index, : ids.shape[1]] = ids
    bases *= 2 * kv_heads * block_size
    keys = _PagedKeys(torch.from_numpy(bases).to(offsets.device), offsets, num_keys)
    return keys, visible(runs, [first * block_size for first in first_blocks], num_keys, window)


def _additive(seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """0 where seen, −inf elsewhere, in the dtype and on the device of `like`."""
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf")).to(like.device, like.dtype)
