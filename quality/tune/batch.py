"""One step's sequences and where in them decode begins: many responses of one window share one pass through the lower layers.

A lower layer sees all earlier tokens whatever they are, so the states below K do not depend on where a prompt ends. So each
window over plain text serves as many prompts: it is cut into spans, and each span is the response to all that comes before it.
Above K a span sees the anchors and itself, exactly what decode sees (design §2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

IGNORED: Final = -100  # a target without loss


@dataclass(frozen=True, slots=True)
class Span:
    """Decode tokens of one sequence: boundary tokens and the response. The first `num_silent` carry no loss."""

    start: int  # P
    stop: int
    num_silent: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Token ids, and its spans in order. A target is the id that follows, so the last id may have none."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class TuneBatch:
    """B sequences of at most S tokens, G spans of at most n; padding comes last and carries no loss."""

    ids: Tensor  # [B, S]
    sequence: Tensor  # [G] whose span it is
    positions: Tensor  # [G, n]
    targets: Tensor  # [G, n], IGNORED where there is no loss

    def to(self, device: torch.device) -> "TuneBatch":
        """The same batch on another device."""
        return TuneBatch(*(t.to(device) for t in (self.ids, self.sequence, self.positions, self.targets)))

    @property
    def num_tokens(self) -> int:
        return self.ids.numel()


def make_tune_batch(sequences: Sequence[Window]) -> TuneBatch:
    """Pad sequences and gather their spans."""
    width = max(len(sequence.ids) for sequence in sequences)
    spans = [(index, span) for index, sequence in enumerate(sequences) for span in sequence.spans]
    length = max(span.stop - span.start for _, span in spans)
    positions, targets = [], []
    for index, span in spans:
        ids, own = sequences[index].ids, range(span.start, span.stop)
        told = [ids[p + 1] if p - span.start >= span.num_silent and p + 1 < len(ids) else IGNORED for p in own]
        padding = length - len(own)
        positions.append([*own, *[own[-1]] * padding])
        targets.append([*told, *[IGNORED] * padding])
    ids_rows = [[*sequence.ids, *[0] * (width - len(sequence.ids))] for sequence in sequences]
    whose = [index for index, _ in spans]
    return TuneBatch(*(torch.tensor(rows) for rows in (ids_rows, whose, positions, targets)))
