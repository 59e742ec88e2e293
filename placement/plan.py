"""What crosses the wire for one request, as a fixed list of entries that both ends compute alike (design §5.2)."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from shoal.types import DType, ModelShape
from shoal.visibility import Visibility, VisibilityKind


class EntryKind(StrEnum):
    """What an entry carries, and its wire layout."""

    KV = "kv"  # one layer's K and V: [num_tokens, 2, kv_heads, head_dim]
    DEEP_STATE = "deep_state"  # hidden states after layer K−1: [num_tokens, hidden_size]


@dataclass(frozen=True, slots=True)
class Entry:
    """A message's payload, or a part of it: tokens [start, stop) of one layer. For deep states `layer` is K."""

    index: int
    kind: EntryKind
    layer: int
    start: int
    stop: int
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def entries_bytes(entries: Iterable[Entry]) -> int:
    """Payload of these entries together."""
    return sum(entry.num_bytes for entry in entries)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Every entry of a transfer, and a digest that two ends compare before any byte moves."""

    entries: tuple[Entry, ...]
    digest: str

    @property
    def num_bytes(self) -> int:
        return entries_bytes(self.entries)


def make_plan(
    shape: ModelShape,
    dtype: DType,
    visibility: Visibility,
    num_prompt_tokens: int,
    num_cached_tokens: int,
    *,
    max_entry_bytes: int,
    max_entry_tokens: int,
) -> TransferPlan:
    """List what a prefill worker ships for prefill tokens c … P−1 (c = num_cached_tokens) under a resolved visibility.

    Window layers ship their last min(T, w−1) tokens. `speed` adds the deep states of anchors c … α−1; late `pop` those of
    the tokens some upper layer still sees. Entries are cut at multiples of the wire size, which no compute chunk moves.
    """
    split = visibility.split(num_prompt_tokens)
    depth, num_layers, stop = visibility.depth(shape.num_layers), shape.num_layers, split.num_prefill_tokens
    kv_bytes, state_bytes = shape.kv_elements * dtype.num_bytes, shape.hidden_size * dtype.num_bytes
    ships_upper_kv = visibility.kind is VisibilityKind.POP and not visibility.late

    def first_visible(layer: int) -> int:
        window = shape.window(layer)
        return num_cached_tokens if window is None else max(num_cached_tokens, stop - (window - 1))

    ranges = [
        (EntryKind.KV, layer, first_visible(layer), stop, kv_bytes) for layer in range(num_layers if ships_upper_kv else depth)
    ]
    if depth < num_layers and visibility.kind is VisibilityKind.SPEED:
        ranges.append((EntryKind.DEEP_STATE, depth, num_cached_tokens, split.num_anchor_tokens, state_bytes))
    elif depth < num_layers and visibility.late:
        first = min(first_visible(layer) for layer in range(depth, num_layers))
        ranges.append((EntryKind.DEEP_STATE, depth, first, stop, state_bytes))

    cuts: list[tuple[EntryKind, int, int, int, int]] = []
    for kind, layer, begin, end, token_bytes in ranges:
        wire_tokens = max(1, min(max_entry_tokens, max_entry_bytes // token_bytes))
        while begin < end:
            cut = min(end, (begin // wire_tokens + 1) * wire_tokens)
            cuts.append((kind, layer, begin, cut, (cut - begin) * token_bytes))
            begin = cut
    # as they become ready, chunk by chunk and each from the bottom up: what follows one another can share a message
    cuts.sort(key=lambda cut: ((cut[3] - 1) // max_entry_tokens, cut[1], cut[2]))
    entries = [Entry(index, *cut) for index, cut in enumerate(cuts)]
    text = f"{visibility} N={num_prompt_tokens} c={num_cached_tokens} " + ";".join(
        f"{e.kind},{e.layer},{e.start},{e.stop},{e.num_bytes}" for e in entries
    )
    return TransferPlan(tuple(entries), hashlib.sha256(text.encode()).hexdigest()[:32])
