"""Attention by torch's scaled_dot_product_attention. Knows runs and the pool's rows; copies paged KV before it attends.

Three shapes of work: a run that starts at slot 0 attends to the rows just computed; a longer run further in gathers its
slots; one-token runs of many requests are gathered together, padded to the longest of a group of similar lengths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right

from shoal.engine.layers import soft_cap
from shoal.engine.query_runs import QueryRun, visible
from shoal.engine.score_rule import ScoreRule
from shoal.errors import InternalError
from shoal.types import ModelShape

_MAX_GROUP_SLOTS = 1 << 16  # keys gathered at once for a group of one-token runs


@dataclass(frozen=True, slots=True)
class _FreshRun:
    """A run whose keys are its own rows."""

    rows: slice
    mask: torch.Tensor | None  # [n, n], None = causal
    rule: ScoreRule

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        q, k, v = (x[self.rows].transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, n, d]
        result = _attention(q, k, v, self.mask, self.rule, is_causal=self.mask is None)
        out[self.rows] = result[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _PagedKeys:
    """Where the keys of b runs lie in the pool, for every layer of a stage."""

    slots: torch.Tensor  # [layers, b, keys] pool row of each slot's K in the first head
    heads: torch.Tensor  # [2, 1, kv_heads, 1] pool rows from there to each head's K and V

    def gather(self, pool_rows: torch.Tensor, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [b, kv_heads, keys, d], in one copy."""
        index = self.slots[layer_index][None, :, None, :] + self.heads
        kv = pool_rows.index_select(0, index.view(-1)).view(*index.shape, -1)
        return kv[0], kv[1]


@dataclass(frozen=True, slots=True)
class _PagedRun:
    """One run of several rows over gathered keys."""

    rows: slice
    keys: _PagedKeys
    mask: torch.Tensor | CausalBias  # [1, n, keys], additive; or each row sees all slots up to its own
    rule: ScoreRule

    def attend(self, q: torch.Tensor, pool_rows: torch.Tensor, layer_index: int, out: torch.Tensor) -> None:
        k, v = self.keys.gather(pool_rows, layer_index)
        queries = q[self.rows].transpose(0, 1).unsqueeze(0)  # [1, heads, n, d]
        result = _attention(queries, k, v, self.mask, self.rule)
        out[self.rows] = result[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _PagedRows:
    """One-token runs over gathered keys; the heads that share KV are folded into the query dimension."""

    rows: torch.Tensor  # [b]
    keys: _PagedKeys
    mask: torch.Tensor | None  # [b, 1, 1, keys], additive
    rule: ScoreRule

    def attend(self, q: torch.Tensor, pool_rows: torch.Tensor, layer_index: int, out: torch.Tensor) -> None:
        k, v = self.keys.gather(pool_rows, layer_index)
        folded = q[self.rows].view(k.shape[0], k.shape[1], -1, q.shape[-1])  # [b, kv_heads, groups, d]
        result = _attention(folded, k, v, self.mask, self.rule)
        out[self.rows] = result.reshape(-1, *q.shape[1:])


class TorchAttentionStage:
    """One stage's attention; see PreparedAttention."""

    def __init__(self, fresh: list[_FreshRun], paged: Sequence[_PagedRun | _PagedRows]) -> None:
        self._fresh = fresh
        self._paged = paged

    def attend(self, q: torch.Tensor, kv: torch.Tensor | None, pool_rows: torch.Tensor, layer_index: int) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for run in self._fresh:
            if kv is None:
                raise InternalError("this back end needs the K and V just computed")
            run.attend(q, kv[:, 0], kv[:, 1], out)
        for runs in self._paged:
            runs.attend(q, pool_rows, layer_index, out)
        return out


class TorchAttention:
    """The back end "torch"; see AttentionBackend."""

    def __init__(self, rule: ScoreRule | None = None) -> None:
        self._rule = rule

    def prepare(
        self, runs: Sequence[QueryRun], window: int | None, shape: ModelShape, pool_rows: torch.Tensor, block_size: int
    ) -> TorchAttentionStage:
        rule = self._rule or ScoreRule.usual(shape)
        fresh: list[_FreshRun] = []
        paged: list[_PagedRun | _PagedRows] = []
        single: list[QueryRun] = []
        heads = torch.arange(2 * shape.num_kv_heads, device=pool_rows.device).view(2, 1, -1, 1) * block_size
        for run in runs:
            rows = slice(run.first_row, run.first_row + run.num_rows)
            if run.start_slot == 0:
                masked = run.needs_mask_beyond_causal(window)
                mask = _additive(visible([run], [0], run.num_rows, window)[0], pool_rows) if masked else None
                fresh.append(_FreshRun(rows, mask, rule))
            elif run.num_rows == 1:
                single.append(run)
            else:
                keys, first = _page([run], window, heads, block_size)
                paged.append(_PagedRun(rows, keys, _run_mask(run, window, first[0], pool_rows, rule), rule))
        for group in _groups(single):
            keys, first_slots = _page(group, window, heads, block_size)
            seen = visible(group, first_slots, keys.slots.shape[2], window)
            mask = None if bool(seen.all()) else _additive(seen.unsqueeze(1), pool_rows)
            index = torch.tensor([run.first_row for run in group], device=pool_rows.device)
            paged.append(_PagedRows(index, keys, mask, rule))
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


def _run_mask(
    run: QueryRun, window: int | None, first_slot: int, like: torch.Tensor, rule: ScoreRule
) -> torch.Tensor | CausalBias:
    """Who sees whom in one run. On a GPU a plain causal run needs no mask in memory, and its kernel reads none."""
    if like.device.type == "cuda" and rule.cap is None and not run.needs_mask_beyond_causal(window):
        return causal_lower_right(run.num_rows, run.num_slots)
    return _additive(visible([run], [first_slot], run.num_slots - first_slot, window), like)


def _page(runs: list[QueryRun], window: int | None, heads: torch.Tensor, block_size: int) -> tuple[_PagedKeys, list[int]]:
    """The keys from each run's lowest visible slot on, and that slot.

    Only slots that the run sees are ever read: padding repeats its last one. A masked slot of someone else, or one not
    written yet, could hold a NaN, and a NaN times zero is a NaN.
    """
    first_slots = [run.first_visible_slot(window) for run in runs]
    num_keys = max(run.num_slots - first for run, first in zip(runs, first_slots, strict=True))
    rows = np.empty((len(runs[0].block_ids), len(runs), num_keys), dtype=np.int64)
    for index, (run, first) in enumerate(zip(runs, first_slots, strict=True)):
        slots = np.minimum(np.arange(first, first + num_keys), run.num_slots - 1)
        blocks = run.block_ids[:, slots // block_size].astype(np.int64)
        rows[:, index] = blocks * (heads.numel() * block_size) + slots % block_size
    return _PagedKeys(torch.from_numpy(rows).to(heads.device), heads), first_slots


def _additive(seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """0 where seen, −inf elsewhere, in the dtype and on the device of `like`."""
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf")).to(like.device, like.dtype)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | CausalBias | None,
    rule: ScoreRule,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """q [b, heads, n, d] over k, v [b, kv_heads, keys, d]: torch's own, or written out where scores have a soft cap."""
    if rule.cap is None:
        out: torch.Tensor = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out
    group = q.shape[1] // k.shape[1]
    grouped = q.reshape(len(q), k.shape[1], group, *q.shape[2:]).to(torch.float32)  # [b, kv_heads, group, n, d]
    scores = soft_cap(grouped @ k.unsqueeze(2).transpose(-1, -2).to(torch.float32) * rule.scale, rule.cap)
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1), float("-inf"))
    elif mask is not None:
        scores += mask.unsqueeze(2) if mask.dim() == 4 else mask
    return (scores.softmax(-1) @ v.unsqueeze(2).to(torch.float32)).flatten(1, 2).to(q.dtype)
