"""One decoder of the Llama family, run over any mix of segments (design §2). Knows weights and segments, no requests."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Self

import torch

from shoal.engine.backends import Backend, choose_backend
from shoal.engine.kv_pool import KvPool
from shoal.engine.layer_backend import Ends, StageRows, StageWork, WholeSteps
from shoal.engine.layers import embed, soft_cap
from shoal.engine.rope import Frequencies, Rotations
from shoal.engine.segment import LogitRows, Segment
from shoal.engine.stages import RowGroup, plan_stages, row_ranges
from shoal.engine.weights import HeldLayers, LoadReport, ModelWeights, load_weights
from shoal.errors import InternalError
from shoal.model_files import DecoderConfig, ModelFiles
from shoal.types import DType

__all__ = ["Decoder", "ForwardPass", "HeldLayers", "LoadReport"]


class Decoder:
    """Weights, or the part of them that is held, and how to run them. Thread-safe as far as the pools given to it are."""

    def __init__(self, weights: ModelWeights, backend: Backend, device: torch.device) -> None:
        """`backend` is given the layers that `weights` has; it may hold layers already."""
        self.config: DecoderConfig = weights.config
        self.device = device
        self.backend = backend
        self.frequencies = Frequencies.of(self.config, self.device)
        self.embedding, self.final_norm, self.head = weights.embedding, weights.final_norm, weights.head
        self.layers = backend.layers
        self.layers.hold(weights.layers, weights.kv_only)
        self.whole_steps: WholeSteps | None = None
        if self.embedding is not None and self.final_norm is not None and self.head is not None:
            ends = Ends(self.frequencies, self.embedding, self.final_norm, self.head)
            self.whole_steps = self.layers.whole_steps(ends) if weights.num_layers == self.config.shape.num_layers else None

    @classmethod
    def load(
        cls,
        model: ModelFiles,
        *,
        dtype: DType,
        held: HeldLayers,
        backend: str = "auto",
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[Self, LoadReport]:
        """Read the held layers of a model's files, and only those, each handed to the back end before the next is read.

        `backend`: "native" (compiled kernels), "torch", or "auto", the first where it works and else the second. Raises
        InvalidConfig for unusable files, an unknown back end, or "native" where it does not work.
        """
        device = torch.device(device)
        chosen = choose_backend(backend, model.config, dtype, device)
        weights, report = load_weights(model, held, dtype=dtype, device=str(device), progress=progress, take=chosen.layers.hold)
        return cls(weights, chosen, device), report

    def forward(self, segments: Sequence[Segment], pool: KvPool) -> "ForwardPass":
        """Prepare one step over `segments` (at least one); iterating or running the result does all the work."""
        return ForwardPass(self, segments, pool)


class ForwardPass:
    """One step. Iterating yields each layer as soon as all K and V that this step writes there are in the pool, before the
    layer's attention. Layers that no segment touches, and those that nobody listens to, are not yielded. Results are complete
    when the iteration ends.
    """

    def __init__(self, decoder: Decoder, segments: Sequence[Segment], pool: KvPool) -> None:
        if not segments:
            raise InternalError("a step needs at least one segment")
        self._decoder = decoder
        self._segments = tuple(segments)
        self._pool = pool
        self._rows = row_ranges(self._segments)
        self._states: dict[int, torch.Tensor] = {}
        self._logits: torch.Tensor | None = None
        self._is_heard: Callable[[int], bool] = lambda layer: True
        self._work = self._execute()

    def __iter__(self) -> Iterator[int]:
        while True:
            with torch.inference_mode():
                layer = next(self._work, None)
            if layer is None:
                return
            yield layer

    def listen(self, is_heard: Callable[[int], bool]) -> Self:
        """Yield only these layers; it is asked of each once, in order. The others run in one go, which is faster."""
        self._is_heard = is_heard
        return self

    def run(self) -> Self:
        """Do all of the work that is left."""
        self._is_heard = lambda layer: False
        with torch.inference_mode():
            for _ in self._work:
                pass
        return self

    @property
    def states(self) -> Mapping[int, torch.Tensor]:
        """Segment index → hidden states after its last full layer [n, h], for segments that keep them. Filled as the
        iteration passes their last layer."""
        return self._states

    @property
    def logits(self) -> torch.Tensor:
        """[rows, vocab] float32, the requested rows of the segments in order. Raises InternalError before the end."""
        if self._logits is None:
            raise InternalError("logits exist only after the whole step has run")
        return self._logits

    def _execute(self) -> Generator[int]:
        decoder, pool = self._decoder, self._pool
        if decoder.whole_steps is not None:
            self._logits = decoder.whole_steps.run(self._segments, pool)
            if self._logits is not None:
                return
        hidden = self._embed()
        self._keep_states(hidden, 0)
        positions = rotary_positions(self._segments).to(decoder.device)
        turn = decoder.frequencies.rotations(positions, decoder.layers.rotation_dtype)
        for stage in plan_stages(self._segments, decoder.device):
            full, kv_only = _rows(stage.full, hidden, turn), _rows(stage.kv_only, hidden, turn)
            run = decoder.layers.run(StageWork(stage, full, kv_only, pool))
            yield from run.layers(lambda layer: self._is_heard(layer))
            if stage.full is not None and run.x is not None:
                if stage.full.rows is None:
                    hidden = run.x
                else:
                    hidden[stage.full.rows] = run.x
            self._add_deep(hidden, stage.layers.stop)
            self._keep_states(hidden, stage.layers.stop)
        self._logits = self._score(hidden)

    def _embed(self) -> torch.Tensor:
        """Hidden states on entry, [rows, h]: embeddings of token ids, or the states that were given."""
        embedding, device = self._decoder.embedding, self._decoder.device
        ids = [token for segment in self._segments for token in segment.token_ids or ()]
        embedded = torch.empty(0)
        if ids:
            if embedding is None:
                raise InternalError("token ids were given, but the embedding is not held here")
            embedded = embed(torch.tensor(ids, device=device), embedding, self._decoder.config)
            self._embed_images(embedded)
        parts: list[torch.Tensor] = []
        first = 0
        for segment in self._segments:
            if segment.states is not None:
                parts.append(segment.states.to(device))
            else:
                parts.append(embedded[first : first + len(segment.positions)])
                first += len(segment.positions)
        return embedded if first == self._rows[-1].stop else torch.cat(parts)

    def _embed_images(self, embedded: torch.Tensor) -> None:
        """Images' features in place of their tokens' embeddings [rows of token ids, h]."""
        first = 0
        for segment in self._segments:
            if segment.token_ids is None:
                continue
            for rows, part, features in segment.kv.images.rows(segment.positions) if segment.kv.images is not None else ():
                own = features.embeddings[part].to(embedded.device, embedded.dtype)
                embedded[first + rows.start : first + rows.stop] = own
            first += len(segment.positions)

    def _add_deep(self, hidden: torch.Tensor, layer: int) -> None:
        """Behind layers 0, 1, … some models add features of images to their tokens' states (DeepStack)."""
        for segment, own in zip(self._segments, self._rows, strict=True):
            images = segment.kv.images
            if images is None or not 0 < layer <= segment.num_deep_layers:
                continue
            for rows, part, features in images.rows(segment.positions):
                hidden[own.start : own.stop][rows] += features.deep[layer - 1][part].to(hidden.device, hidden.dtype)

    def _keep_states(self, hidden: torch.Tensor, layer: int) -> None:
        for index, (segment, rows) in enumerate(zip(self._segments, self._rows, strict=True)):
            if segment.keep_states and segment.layers.stop == layer:
                self._states[index] = hidden[rows.start : rows.stop].clone()

    def _score(self, hidden: torch.Tensor) -> torch.Tensor:
        decoder = self._decoder
        rows = [row for segment, own in zip(self._segments, self._rows, strict=True) for row in _logit_rows(segment, own)]
        if not rows:
            return torch.empty(0, decoder.config.shape.vocab_size, device=decoder.device)
        if decoder.final_norm is None or decoder.head is None:
            raise InternalError("logits were asked for, but the LM head is not held here")
        x = hidden[torch.tensor(rows, device=decoder.device)]
        return soft_cap(decoder.layers.score(x, decoder.final_norm, decoder.head), decoder.config.logit_softcap)


def rotary_positions(segments: Sequence[Segment]) -> torch.Tensor:
    """What rows turn by: their positions [n], or, where an image among them changes that, [3, n]."""
    if not any(s.kv.images is not None and s.kv.images.has_grids for s in segments):
        return torch.cat([torch.arange(s.positions.start, s.positions.stop) for s in segments])
    parts = [
        torch.arange(s.positions.start, s.positions.stop).expand(3, -1)
        if s.kv.images is None
        else torch.from_numpy(s.kv.images.rotary_positions(s.positions))
        for s in segments
    ]
    return torch.cat(parts, dim=1)


def _rows(group: RowGroup | None, hidden: torch.Tensor, turn: Rotations) -> StageRows | None:
    """The group's rows of the step's hidden states, and their rotation."""
    if group is None:
        return None
    if group.rows is None:
        return StageRows(group, hidden, turn)
    return StageRows(group, hidden[group.rows], turn[group.rows])


def _logit_rows(segment: Segment, rows: range) -> range:
    return {LogitRows.NONE: rows[:0], LogitRows.LAST: rows[-1:], LogitRows.ALL: rows}[segment.logits]
