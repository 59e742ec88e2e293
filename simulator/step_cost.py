"""Seconds of one step, and of a prefill leg, on a worker. Knows formulas 1 and 2 of the capacity model; knows no queue, no link.

Sources: prefill at depth K and the decode step as in docs/planning.md (formulas 1 and 2), which placement/seconds.py states for
dense models on one GPU; a test holds the two equal there. Here also: MLA and experts (model_spec.py), tensor parallelism
(machine.py), steps that mix chunks and decode rows.
"""

from collections import Counter
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

    @property
    def total_s(self) -> float:
        return self.layers_s + self.projections_s + self.overhead_s


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
        """Formula 1 for prefill tokens [start, stop): a chunk after others, or after a cached prefix of `start` tokens.

        max(2·n·Σp/(F·e_g·n/(n + n_half)), weight bytes/(BW·e_w)) + Σ 4·H·d·(A_l(stop) − A_l(start))/(F·e_a) + K·t_layer + t_step
        + all-reduces. Weights are read again by every chunk.
        """
        num_tokens = stop - start
        if num_tokens <= 0:
            return ChunkCost(0.0, 0.0, 0.0)
        active = self._lower_weights
        read = self._read_weights(self.depth, num_tokens)
        pairs = sum(count * (causal_pairs(stop, window) - causal_pairs(start, window)) for window, count in self._lower_windows)
        layers_s = self._linear_s(num_tokens, active, read) + pairs * self.model.attention_pair_flops / (
            self.machine.attention_flops_per_s
        )
        layers_s += self.depth * self.machine.profile.layer_s
        layers_s += self.machine.allreduce_seconds(self.model, num_tokens, self.depth)
        projections_s = 0.0
        if self.projects_early:
            weights = self.num_upper * self.model.kv_projection_weights
            projections_s = self._linear_s(num_tokens, weights, weights)
        return ChunkCost(layers_s, projections_s, self.machine.profile.step_s)

    def prefill_s(self, num_tokens: int, *, num_cached: int = 0, chunk_tokens: int | None = None) -> float:
        """The prefill leg of tokens [num_cached, num_tokens), whole or in chunks."""
        return sum(self.chunk(start, stop).total_s for start, stop in chunks(num_cached, num_tokens, chunk_tokens))

    def step_s(
        self,
        num_rows: int,
        num_kv_layer_tokens: float,
        *,
        num_chunk_tokens: int = 0,
        num_chunk_pairs: int = 0,
        num_deep_tokens: int = 0,
        num_projected_tokens: int = 0,
    ) -> float:
        """Formula 2, for a step through all L layers with the LM head: rows of one token, and chunks beside them.

        max(weight bytes/(BW·e_w), 2·n·weights/(F·e_g)) + kb·pairs/(BW·e_kv) + chunks' attention + L·t_layer + t_step +
        all-reduces. The factor n/(n + n_half) of formula 1 applies when a chunk takes part. `num_deep_tokens` (anchors under
        `speed`) run the upper layers only; late `pop` projects `num_projected_tokens` above K.
        """
        model, machine, num_layers = self.model, self.machine, self.model.shape.num_layers
        num_tokens = num_rows + num_chunk_tokens
        weights = num_tokens * self._all_weights + num_deep_tokens * (self._all_weights - self._lower_weights)
        weights += num_projected_tokens * self.num_upper * model.kv_projection_weights + max(1, num_rows) * model.head_weights
        share = 1.0
        if num_chunk_tokens or num_projected_tokens:
            wide = num_tokens + num_projected_tokens
            share = wide / (wide + machine.profile.num_half_tokens)
        linear_s = 2 * weights / (machine.linear_flops_per_s(model) * share)
        read = self._read_weights(num_layers, num_tokens) + model.head_weights
        weights_s = read * model.weight_bytes / machine.weight_bytes_per_s
        kv_s = num_kv_layer_tokens * model.kv_token_bytes / machine.kv_bytes_per_s(model)
        attention_s = num_chunk_pairs * model.attention_pair_flops / machine.attention_flops_per_s
        overhead_s = num_layers * machine.profile.layer_s + machine.profile.step_s
        overhead_s += machine.allreduce_seconds(model, num_tokens, num_layers)
        return max(linear_s, weights_s) + kv_s + attention_s + overhead_s

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
