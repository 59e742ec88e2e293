"""One decoder of the Llama family, run over any mix of segments (design §2). Knows weights and segments, no requests."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Self

import torch
import torch.nn.functional as F

from shoal.engine.attention import PreparedAttention, attention_backend
from shoal.engine.kv_pool import KvPool
from shoal.engine.layers import finish_layer, project_kv, project_qkv, rms_norm
from shoal.engine.rope import Rotation, inverse_frequencies, rotation
from shoal.engine.segment import LogitRows, Segment
from shoal.engine.stages import RowGroup, Stage, plan_stages, row_ranges
from shoal.engine.weights import HeldLayers, KvWeights, LayerWeights, LoadReport, ModelWeights, load_weights
from shoal.errors import InternalError
from shoal.model_files import DecoderConfig, ModelFiles
from shoal.types import DType

__all__ = ["Decoder", "ForwardPass", "HeldLayers", "LoadReport"]


class Decoder:
    """Weights, or the part of them that is held, and how to run them. Thread-safe as far as the pools given to it are."""

    def __init__(self, weights: ModelWeights, *, attention: str = "torch", device: torch.device | str = "cpu") -> None:
        self.weights = weights
        self.config: DecoderConfig = weights.config
        self.device = torch.device(device)
        self.attention = attention_backend(attention)
        self.frequencies = inverse_frequencies(self.config.rope, self.config.shape.head_dim, self.device)

    @classmethod
    def load(
        cls,
        model: ModelFiles,
        *,
        dtype: DType,
        held: HeldLayers,
        attention: str = "torch",
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[Self, LoadReport]:
        """Read the held layers of a model's files, and only those. Raises InvalidConfig for unusable files."""
        weights, report = load_weights(model, held, dtype=dtype, device=str(device), progress=progress)
        return cls(weights, attention=attention, device=device), report

    def forward(self, segments: Sequence[Segment], pool: KvPool) -> "ForwardPass":
        """Prepare one step over `segments` (at least one); iterating or running the result does all the work."""
        return ForwardPass(self, segments, pool)

    def layer_weights(self, layer: int) -> LayerWeights:
        """Raises InternalError for a layer that is not held in full."""
        if layer not in self.weights.layers:
            raise InternalError(f"layer {layer} is not held in full here")
        return self.weights.layers[layer]

    def kv_weights(self, layer: int) -> KvWeights:
        """Raises InternalError for a layer whose K/V projection is not held."""
        if layer in self.weights.layers:
            return self.weights.layers[layer].kv
        if layer not in self.weights.kv_only:
            raise InternalError(f"the K/V projection of layer {layer} is not held here")
        return self.weights.kv_only[layer]


class ForwardPass:
    """One step. Iterating yields each layer as soon as all K and V that this step writes there are in the pool, before the
    layer's attention; layers that no segment touches are not yielded. Results are complete when the iteration ends.
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
        self._work = self._execute()

    def __iter__(self) -> Iterator[int]:
        return self._work

    def run(self) -> Self:
        """Do all of the work that is left."""
        for _ in self:
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

    @torch.inference_mode()
    def _execute(self) -> Generator[int]:
        decoder, pool, config = self._decoder, self._pool, self._decoder.config
        hidden = self._embed()
        self._keep_states(hidden, 0)
        positions = [torch.arange(s.positions.start, s.positions.stop) for s in self._segments]
        turn = rotation(torch.cat(positions).to(decoder.device), decoder.frequencies, hidden.dtype)
        for stage in plan_stages(self._segments, decoder.device):
            full, kv_only = stage.full, stage.kv_only
            x, x_turn = _select(full, hidden, turn)
            resting, resting_turn = _select(kv_only, hidden, turn)
            attentions: dict[int | None, PreparedAttention] = {}
            for index, layer in enumerate(stage.layers):
                if kv_only is not None:
                    kv = project_kv(resting, decoder.kv_weights(layer), config, resting_turn)
                    pool.write(kv, kv_only.blocks[index], kv_only.offsets)
                if full is not None:
                    weights = decoder.layer_weights(layer)
                    q, kv = project_qkv(x, weights, config, x_turn)
                    pool.write(kv, full.blocks[index], full.offsets)
                yield layer
                if full is not None:
                    attention = self._attention(stage, layer, attentions)
                    attended = attention.attend(q, kv[:, 0], kv[:, 1], pool.rows, index)
                    x = finish_layer(x, attended, weights, config)
            if full is not None and full.rows is not None:
                hidden[full.rows] = x
            elif full is not None:
                hidden = x
            self._keep_states(hidden, stage.layers.stop)
        self._logits = self._score(hidden)

    def _embed(self) -> torch.Tensor:
        """Hidden states on entry, [rows, h]: embeddings of token ids, or the states that were given."""
        weights, device = self._decoder.weights, self._decoder.device
        ids = [token for segment in self._segments for token in segment.token_ids or ()]
        embedded = torch.empty(0)
        if ids:
            if weights.embedding is None:
                raise InternalError("token ids were given, but the embedding is not held here")
            embedded = F.embedding(torch.tensor(ids, device=device), weights.embedding)
        parts: list[torch.Tensor] = []
        first = 0
        for segment in self._segments:
            if segment.states is not None:
                parts.append(segment.states.to(device))
            else:
                parts.append(embedded[first : first + len(segment.positions)])
                first += len(segment.positions)
        return embedded if first == self._rows[-1].stop else torch.cat(parts)

    def _keep_states(self, hidden: torch.Tensor, layer: int) -> None:
        for index, (segment, rows) in enumerate(zip(self._segments, self._rows, strict=True)):
            if segment.keep_states and segment.layers.stop == layer:
                self._states[index] = hidden[rows.start : rows.stop].clone()

    def _attention(self, stage: Stage, layer: int, made: dict[int | None, PreparedAttention]) -> PreparedAttention:
        shape = self._decoder.config.shape
        window = shape.window(layer)
        if window not in made:
            backend, pool = self._decoder.attention, self._pool
            made[window] = backend.prepare(stage.runs, window, shape, pool.rows, pool.block_size)
        return made[window]

    def _score(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, config = self._decoder.weights, self._decoder.config
        rows = [row for segment, own in zip(self._segments, self._rows, strict=True) for row in _logit_rows(segment, own)]
        if not rows:
            return torch.empty(0, config.shape.vocab_size, device=self._decoder.device)
        if weights.final_norm is None or weights.head is None:
            raise InternalError("logits were asked for, but the LM head is not held here")
        x = hidden[torch.tensor(rows, device=self._decoder.device)]
        return F.linear(rms_norm(x, weights.final_norm, config.rms_eps), weights.head).to(torch.float32)


def _select(group: RowGroup | None, hidden: torch.Tensor, turn: Rotation) -> tuple[torch.Tensor, Rotation]:
    """The group's rows of the step's hidden states, and their rotation."""
    if group is None or group.rows is None:
        return hidden, turn
    return hidden[group.rows], turn[group.rows]


def _logit_rows(segment: Segment, rows: range) -> range:
    return {LogitRows.NONE: rows[:0], LogitRows.LAST: rows[-1:], LogitRows.ALL: rows}[segment.logits]
