"""A whole diagnosis: layers, recommended depths, and what they were made from; as JSON. Draws nothing, prints nothing."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shoal.model_files import ModelFiles
from shoal.quality.data import LoadedData
from shoal.quality.diagnose.layers import LayerDiagnosis, diagnose_layers
from shoal.quality.diagnose.recommend import (
    RULE,
    Recommendation,
    depths_to_measure,
    predicted_costs,
    predicted_depth,
    recommend,
)
from shoal.quality.evaluate.scores import Scorer, Subject
from shoal.quality.torch_model import TorchDecoder
from shoal.visibility import Visibility, VisibilityKind

Progress = Callable[[str, int, int], None]  # what, done, of how many
_KINDS = (VisibilityKind.POP, VisibilityKind.SPEED)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found of a model on some data."""

    model: str
    revision: str
    data: str
    num_examples: int
    num_response_tokens: int
    boundary_tokens: int  # of `speed`; `pop` has 1
    layers: tuple[LayerDiagnosis, ...]
    recommendations: tuple[Recommendation, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        found = asdict(self) | {"rule": RULE}
        for entry, own in zip(found["recommendations"], self.recommendations, strict=True):
            entry["visibility"] = own.text
            entry["measured_ratios"] = {str(depth): ratio for depth, ratio in own.measured_ratios.items()}
        return found


def diagnose(
    files: ModelFiles,
    model: TorchDecoder,
    data: LoadedData,
    *,
    tolerance: float = 1.05,
    seed: int = 0,
    progress: Progress | None = None,
) -> Diagnosis:
    """Importance of every layer, then the depths it recommends, measured on the same examples."""
    layers = diagnose_layers(
        model,
        data.examples,
        seed=seed,
        progress=None if progress is None else lambda done, total: progress("virtual gates", done, total),
    )
    subjects: list[Subject] = []
    costs = {kind: predicted_costs(layers, kind) for kind in _KINDS}
    for kind in _KINDS:
        for depth in depths_to_measure(predicted_depth(costs[kind], tolerance), model.num_layers):
            visibility = Visibility.parse(f"{kind}:{depth}").resolve(model.num_layers, data.boundary_tokens)
            subjects.append(Subject(str(visibility.policy), model, visibility))
    scores = Scorer(model, data.examples).score(subjects, progress)[1:]
    measured: dict[VisibilityKind, dict[int, float]] = {kind: {} for kind in _KINDS}
    for subject, score in zip(subjects, scores, strict=True):
        measured[subject.visibility.kind][subject.visibility.depth(model.num_layers)] = score.ratio
    return Diagnosis(
        files.name,
        files.revision,
        data.name,
        len(data.examples),
        data.num_response_tokens,
        data.boundary_tokens,
        tuple(layers),
        tuple(recommend(kind, costs[kind], measured[kind], tolerance) for kind in _KINDS),
    )
