"""From importance by layer to a prefill depth: predicted first, then measured. Knows numbers; runs nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.quality.diagnose.layers import LayerDiagnosis
from shoal.visibility import VisibilityKind

RULE: Final = (
    "predicted: the smallest K for which the estimated costs of the layers K … L−1 (prefill importance for pop, sight for speed) "
    "add up to at most ln(tolerance) nats a token; recommended: the smallest K around it from which on every measured perplexity "
    "is at most tolerance × full depth's"
)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A depth for one kind of visibility."""

    kind: str
    predicted_depth: int
    recommended_depth: int | None  # None when no measured depth holds the tolerance: serve `full`
    tolerance: float  # perplexity over full depth's
    predicted_costs: tuple[float, ...]  # nats a token at K = 0 … L
    measured_ratios: Mapping[int, float]  # K → perplexity over full depth's

    @property
    def text(self) -> str:
        """What to pass as --visibility."""
        return "full" if self.recommended_depth is None else f"{self.kind}:{self.recommended_depth}"


def predicted_costs(layers: Sequence[LayerDiagnosis], kind: VisibilityKind) -> tuple[float, ...]:
    """Estimated loss increase at K = 0 … L, nats a response token: the sum over layers K … L−1."""
    each = [layer.prefill.layer if kind is VisibilityKind.POP else layer.sight for layer in layers]
    return tuple(sum(each[depth:]) for depth in range(len(each) + 1))


def predicted_depth(costs: Sequence[float], tolerance: float) -> int:
    """The smallest K, at least 1, whose predicted cost is within the tolerance."""
    return next(depth for depth in range(1, len(costs)) if depth == len(costs) - 1 or costs[depth] <= math.log(tolerance))


def depths_to_measure(predicted: int, num_layers: int) -> list[int]:
    """Around the prediction, wider above: a prediction adds up single layers and so tends to be too hopeful."""
    return [depth for depth in range(predicted - 2, predicted + 7) if 1 <= depth < num_layers]


def recommend(kind: VisibilityKind, costs: Sequence[float], measured: Mapping[int, float], tolerance: float) -> Recommendation:
    """Apply RULE."""
    best: int | None = None
    for depth in sorted(measured, reverse=True):
        if measured[depth] > tolerance:
            break
        best = depth
    return Recommendation(str(kind), predicted_depth(costs, tolerance), best, tolerance, tuple(costs), dict(measured))
