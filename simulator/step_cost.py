"""Seconds of one step, and of a prefill leg, on a worker. Knows formulas 1 and 2 of the capacity model; knows no queue, no link.

Sources: prefill at depth K and the decode step as in docs/planning.md (formulas 1 and 2), which placement/seconds.py states for
dense models on one GPU; a test holds the two equal there. Here also: MLA and experts (model_spec.py), tensor parallelism
(machine.py), steps that mix chunks and decode rows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shoal.placement.cost import causal_pairs
from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.visibility import Visibility, VisibilityKind


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """Seconds of one prefill chunk run alone, split as the layers finish."""

    layers_s: float  # the K lower layers, all rows
    projections_s: float  # plain `pop`: K and V of the upper layers
    overhead_s: float  # t_step, before the first layer

    def longer(self, factor: float) -> "ChunkCost":
        """The same, stretched."""
        return ChunkCost(self.layers_s * factor, self.projections_s * factor, self.overhead_s * factor)

    @property
    def total_s(self) -> float:
        return self.layers_s + self.projections_s + self.overhead_s


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step of a decode or colocated worker runs."""

    num_rows: int = 0  # requests whose last token of the step samples: one decode token each
    num_kv_layer_tokens: float = 0.0  # (token, layer) pairs of KV that the rows read
    num_chunk_tokens: int = 0  # further decode tokens (boundary, replayed) through all layers
    num_pairs: int = 0  # attention pairs of chunks and prefill tokens over their layers
    num_deep_tokens: int = 0  # anchors (`speed`): upper layers only
    num_projected_tokens: int = 0  # late `pop`: K and V projections above K
    num_prefill_tokens: int = 0  # colocated: prefill tokens, lower layers


@dataclass(frozen=True)
class StepCost:
    """The cost of steps of one model on one machine under one resolved visibility."""

    model: ModelSpec
    machine: Machine
    visibility: Visibility

    @property
    def depth(self) -> int:
        return self.visibility.depth(self.model.shape.num_layers)

    @property
    def num_upper(self) -> int:
        return self.model.shape.num_layers - self.depth

    @property
    def projects_early(self) -> bool:
        """Whether prefill makes the upper layers' K and V (plain `pop`)."""
        return self.visibility.kind is VisibilityKind.POP and not self.visibility.late and self.num_upper > 0

    def chunk(self, start: int, stop: int) -> ChunkCost:
        """One prefill chunk alone in its step: tokens [start, stop), after others or after a cached prefix of `start`."""
        return self.prefill_step([(start, stop)])

    def prefill_step(self, ranges: Sequence[tuple[int, int]]) -> ChunkCost:
        """Formula 1 for the chunks [start, stop) of one step of a prefill worker, n tokens together.

        max(2·n·Σp/(F·e_g·n/(n + n_half)), weight bytes/(BW·e_w)) + Σ 4·H·d·(A_l(stop) − A_l(start))/(F·e_a) + K·t_layer + t_step
        + all-reduces. Weights are read again by every step.
        """
        num_tokens = sum(stop - start for start, stop in ranges)
        if num_tokens <= 0:
            return ChunkCost(0.0, 0.0, 0.0)
        pairs = sum(self.lower_pairs(start, stop) for start, stop in ranges)
        layers_s = self._linear_s(num_tokens, self._lower_weights, self._read_weights(self.depth, num_tokens))
        layers_s += pairs * self.model.attention_pair_flops / self.machine.attention_flops_per_s
        layers_s += self.depth * self.machine.profile.layer_s
        layers_s += self.machine.allreduce_seconds(self.model, num_tokens, self.depth)
        projections_s = 0.0
        if self.projects_early:
            weights = self.num_upper * self.model.kv_projection_weights
            projections_s = self._linear_s(num_tokens, weights, weights)
        return ChunkCost(layers_s, projections_s, self.machine.profile.step_s)

    def lower_pairs(self, start: int, stop: int) -> int:
        """Σ_{l<K} A_l(stop) − A_l(start): attention pairs of tokens [start, stop) in the lower layers."""
        return sum(count * (causal_pairs(stop, window) - causal_pairs(start, window)) for window, count in self._lower_windows)

    def prefill_s(self, num_tokens: int, *, num_cached: int = 0, chunk_tokens: int | None = None) -> float:
        """The prefill leg of tokens [num_cached, num_tokens), whole or in chunks."""
        return sum(self.chunk(start, stop).total_s for start, stop in chunks(num_cached, num_tokens, chunk_tokens))

    def step_s(self, work: StepWork) -> float:
        """Formula 2 for a step through all L layers with the LM head, and what a colocated or beginning step adds.

        max(weight bytes/(BW·e_w), 2·n·weights/(F·e_g)) + kb·pairs/(BW·e_kv) + chunks' attention + L·t_layer + t_step +
        B·t_row + all-reduces. The factor n/(n + n_half) of formula 1 applies when more than single rows take part.
        """
        model, machine, num_layers = self.model, self.machine, self.model.shape.num_layers
        num_full = work.num_rows + work.num_chunk_tokens
        num_run = num_full if num_full else work.num_prefill_tokens
        projections = self.num_upper * model.kv_projection_weights
        weights = num_full * self._all_weights + work.num_deep_tokens * (self._all_weights - self._lower_weights)
        weights += work.num_projected_tokens * projections + work.num_rows * model.head_weights
        weights += work.num_prefill_tokens * (self._lower_weights + (projections if self.projects_early else 0))
        num_wide = work.num_chunk_tokens + work.num_projected_tokens + work.num_prefill_tokens
        share = 1.0
        if num_wide:
            share = (num_wide + work.num_rows) / (num_wide + work.num_rows + machine.profile.num_half_tokens)
        linear_s = 2 * weights / (machine.linear_flops_per_s(model) * share)
        depth = num_layers if num_full else self.depth if num_run else 0
        read = self._read_weights(depth, num_run) if num_run else projections
        read += model.head_weights if num_full else 0
        weights_s = read * model.weight_bytes / machine.weight_bytes_per_s
        kv_s = work.num_kv_layer_tokens * self.kv_pair_s
        attention_s = work.num_pairs * model.attention_pair_flops / machine.attention_flops_per_s
        overhead_s = depth * machine.profile.layer_s + machine.profile.step_s + work.num_rows * machine.profile.row_s
        overhead_s += machine.allreduce_seconds(model, num_full + work.num_prefill_tokens, depth)
        return max(linear_s, weights_s) + kv_s + attention_s + overhead_s

    @cached_property
    def kv_pair_s(self) -> float:
        """Seconds to read one token's KV of one layer."""
        return self.model.kv_token_bytes / self.machine.kv_bytes_per_s(self.model)

    @cached_property
    def _lower_weights(self) -> int:
        return sum(self.model.active_weights(layer) for layer in range(self.depth))

    @cached_property
    def _all_weights(self) -> int:
        return sum(self.model.active_weights(layer) for layer in range(self.model.shape.num_layers))

    @cached_property
    def _lower_windows(self) -> tuple[tuple[int | None, int], ...]:
        """(window, how many of the lower K layers have it)."""
        return tuple(Counter(self.model.shape.window(layer) for layer in range(self.depth)).items())

    def _read_weights(self, num_layers: int, num_tokens: int) -> float:
        """Weights that a step of so many tokens reads in the lowest `num_layers` layers."""
        if self.model.experts is None:
            return self._lower_weights if num_layers == self.depth else self._all_weights
        return sum(self.model.read_weights(layer, num_tokens) for layer in range(num_layers))

    def _linear_s(self, num_tokens: int, active_weights: float, read_weights: float) -> float:
        share = num_tokens / (num_tokens + self.machine.profile.num_half_tokens)
        linear_s = 2 * num_tokens * active_weights / (self.machine.linear_flops_per_s(self.model) * share)
        return max(linear_s, read_weights * self.model.weight_bytes / self.machine.weight_bytes_per_s)


def chunks(start: int, stop: int, chunk_tokens: int | None) -> list[tuple[int, int]]:
    """[start, stop) cut into chunks of at most `chunk_tokens`; None = one."""
    size = chunk_tokens or max(1, stop - start)
    return [(begin, min(stop, begin + size)) for begin in range(start, stop, size)]
