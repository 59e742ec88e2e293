"""What one step runs: consecutive tokens of one request through some layers (design §2). Knows layouts, no weights.

A request's step is one or two segments. Which layers a row runs in full, where it only leaves K and V, and where it starts
is decided here and nowhere else; the decoder just executes segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from shoal.engine.vision.prompt_images import PromptImages
from shoal.errors import InternalError
from shoal.placement.tables import BlockTable, KvLayout, RequestTables
from shoal.visibility import VisibilityKind


class LogitRows(StrEnum):
    """Which rows of a segment get scores over the vocabulary."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class RequestKv:
    """Where one request's KV lives: its layout and the block tables of its two visible sets; and what its images change."""

    layout: KvLayout
    lower: BlockTable
    upper: BlockTable
    images: PromptImages | None = None  # of its prompt

    @classmethod
    def of(cls, tables: RequestTables, images: PromptImages | None = None) -> "RequestKv":
        """The view of a request's tables that segments carry; later `reserve` calls are seen through it."""
        return cls(tables.layout, tables.lower, tables.upper, images)

    def is_lower(self, layer: int) -> bool:
        """Whether `layer` belongs to the lower visible set."""
        return layer in self.layout.lower_layers

    def slots(self, layer: int, positions: range) -> range:
        """The slots of consecutive visible positions at `layer`. Raises InternalError where they are not consecutive."""
        if self.is_lower(layer):
            return positions
        first, last = self.layout.upper_slot(positions[0]), self.layout.upper_slot(positions[-1])
        if last - first != len(positions) - 1:
            raise InternalError(f"positions {positions[0]}…{positions[-1]} are not one run of slots at layer {layer}")
        return range(first, last + 1)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request in one step. Raises InternalError when the fields contradict each other."""

    kv: RequestKv
    positions: range  # the prompt's own numbering, never empty
    layers: range  # these rows run here in full
    kv_only_layers: range  # directly after `layers`: only input norm, K and V of the hidden state at layers.stop
    token_ids: tuple[int, ...] | None = None  # when the first layer is 0
    states: torch.Tensor | None = None  # [n, h], when it is K
    keep_states: bool = False  # hand the hidden states at layers.stop back
    logits: LogitRows = LogitRows.NONE

    @property
    def num_deep_layers(self) -> int:
        """Layers behind which features of images among these rows are added."""
        images = self.kv.images
        if images is None or self.token_ids is None or not any(True for _ in images.rows(self.positions)):
            return 0
        return min(images.num_deep_layers, self.layers.stop)

    def __post_init__(self) -> None:
        if not self.positions or (self.token_ids is None) == (self.states is None):
            raise InternalError("a segment needs at least one position, and either token ids or states")
        given = self.token_ids if self.token_ids is not None else self.states
        if given is None or len(given) != len(self.positions):
            raise InternalError(f"a segment of {len(self.positions)} positions was given another number of inputs")
        if (self.layers.start == 0) != (self.token_ids is not None):
            raise InternalError("token ids enter at layer 0, states above it")
        if self.kv_only_layers and self.kv_only_layers.start != self.layers.stop:
            raise InternalError("K/V-only layers must follow the full layers directly")
        if self.logits is not LogitRows.NONE and self.layers.stop != self.kv.layout.num_layers:
            raise InternalError("logits need every layer")


def prefill_segments(kv: RequestKv, token_ids: Sequence[int], positions: range) -> list[Segment]:
    """One compute chunk of prefill tokens: everything they must leave behind and nothing more.

    `full`, and every kind at K = L: K and V in the last layer, whose attention and MLP nobody would read.
    `speed`: anchors run all K layers and hand their states back; the others stop at the K and V of layer K−1.
    `pop`: K layers, then K and V of every upper layer from the state after layer K−1; `late` hands the states back instead.
    """
    layout = kv.layout
    if positions.stop > layout.split.num_prefill_tokens:
        raise InternalError(f"positions up to {positions.stop} are not prefill tokens of {layout.split}")
    ids, depth, num_layers = tuple(token_ids), layout.lower_layers.stop, layout.num_layers
    leave_kv_only = (range(depth - 1), range(depth - 1, depth))
    if depth == num_layers:
        return [Segment(kv, positions, *leave_kv_only, token_ids=ids)]
    if layout.visibility.kind is VisibilityKind.POP:
        late = layout.visibility.late
        upper = range(depth, depth if late else num_layers)
        return [Segment(kv, positions, range(depth), upper, token_ids=ids, keep_states=late)]
    cut = min(max(layout.split.num_anchor_tokens, positions.start), positions.stop)
    num_anchors = cut - positions.start
    segments = []
    if num_anchors:
        anchors = range(positions.start, cut)
        segments.append(Segment(kv, anchors, range(depth), range(depth, depth), token_ids=ids[:num_anchors], keep_states=True))
    if cut < positions.stop:
        segments.append(Segment(kv, range(cut, positions.stop), *leave_kv_only, token_ids=ids[num_anchors:]))
    return segments


def local_prefill_segments(kv: RequestKv, token_ids: Sequence[int], positions: range) -> list[Segment]:
    """The same where prefill and decode tokens share a pool: nothing crosses, so what would be shipped as deep states goes on
    at once. Anchors run every layer, late `pop` is projected in the same pass.
    """
    return [_carried_on(segment) if segment.keep_states else segment for segment in prefill_segments(kv, token_ids, positions)]


def _carried_on(segment: Segment) -> Segment:
    layout = segment.kv.layout
    first_kv_only = layout.upper_layers.start if layout.visibility.kind is VisibilityKind.POP else layout.num_layers - 1
    kv_only = range(first_kv_only, layout.num_layers)
    return replace(segment, layers=range(first_kv_only), kv_only_layers=kv_only, keep_states=False)


def decode_segment(kv: RequestKv, token_ids: Sequence[int], positions: range, logits: LogitRows = LogitRows.LAST) -> Segment:
    """Boundary, replayed or generated tokens through every layer. Without logits the last layer only leaves K and V."""
    num_layers = kv.layout.num_layers
    if positions.start < kv.layout.split.num_prefill_tokens:
        raise InternalError(f"position {positions.start} is not a decode token of {kv.layout.split}")
    if logits is LogitRows.NONE:
        return Segment(kv, positions, range(num_layers - 1), range(num_layers - 1, num_layers), token_ids=tuple(token_ids))
    return Segment(kv, positions, range(num_layers), range(num_layers, num_layers), token_ids=tuple(token_ids), logits=logits)


def scored_segments(kv: RequestKv, token_ids: Sequence[int], positions: range, scored: range, *, draws: bool) -> list[Segment]:
    """Decode tokens of which those at positions `scored` (within the chunk, before its last token when `draws`) get scores over
    the vocabulary, and the last one too when a token is drawn from it. Rows of logits come in this order.
    """
    ids = tuple(token_ids)
    scored = scored or range(positions.start, positions.start)
    cuts = (
        (range(positions.start, scored.start), LogitRows.NONE),
        (scored, LogitRows.ALL),
        (range(scored.stop, positions.stop), LogitRows.LAST if draws else LogitRows.NONE),
    )
    first = positions.start
    return [decode_segment(kv, ids[cut.start - first : cut.stop - first], cut, logits) for cut, logits in cuts if cut]


def anchor_segment(kv: RequestKv, states: torch.Tensor, positions: range) -> Segment:
    """`speed`: anchors through the upper layers from their states after layer K−1 ([n, h]).

    It must run in the same step as, or before, the request's first decode tokens, and after or with all earlier anchors.
    """
    upper = kv.layout.upper_layers
    if kv.layout.visibility.kind is not VisibilityKind.SPEED or positions.stop > kv.layout.split.num_anchor_tokens:
        raise InternalError(f"positions up to {positions.stop} are not anchors under {kv.layout.visibility}")
    last = range(upper.stop - 1, upper.stop)
    return Segment(kv, positions, range(upper.start, last.start), last, states=states)


def late_projection_segment(kv: RequestKv, states: torch.Tensor, positions: range) -> Segment:
    """Late `pop`: K and V of every upper layer from the states after layer K−1 ([n, h])."""
    upper = kv.layout.upper_layers
    if not kv.layout.visibility.late or positions.stop > kv.layout.split.num_prefill_tokens:
        raise InternalError(f"positions up to {positions.stop} are not projected late under {kv.layout.visibility}")
    return Segment(kv, positions, range(upper.start, upper.start), upper, states=states)
