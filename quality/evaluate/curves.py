"""Curves over K, anchors and boundary: which visibilities they need, and their picture. Scores nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.quality.evaluate.scores import Scores
from shoal.quality.plotting import figure
from shoal.visibility import Visibility, VisibilityKind

ANCHORS: Final = (0, 1, 2, 4, 16)
BOUNDARIES: Final = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one line: what varies, and the visibility of each value."""

    name: str  # "speed", "speed without the anchor", …
    axis: str  # "K", "anchors", "boundary"
    values: tuple[int, ...]
    visibilities: tuple[str, ...]


def curves(depths: Sequence[int], depth: int) -> list[Curve]:
    """Lines over K at `depths`; over anchors and boundary at K = `depth`."""
    at = tuple(depths)
    own = (
        ("pop", "pop:{}"),
        ("speed", "speed:{}"),
        ("speed, no anchor", "speed:{}:anchors=0"),
        ("speed, b = 16", "speed:{}:boundary=16"),
    )
    lines = [Curve(name, "K", at, tuple(_text(form.format(k)) for k in at)) for name, form in own]
    anchors = tuple(_text(f"speed:{depth}:anchors={count}") for count in ANCHORS)
    lines.append(Curve(f"speed:{depth}", "anchors", ANCHORS, anchors))
    for kind in ("speed", "pop"):
        boundaries = tuple(_text(f"{kind}:{depth}:boundary={count}") for count in BOUNDARIES)
        lines.append(Curve(f"{kind}:{depth}", "boundary", BOUNDARIES, boundaries))
    return lines


def needed(lines: Sequence[Curve]) -> list[str]:
    """Every visibility of the lines, once."""
    return list(dict.fromkeys(text for line in lines for text in line.visibilities))


def draw(lines: Sequence[Curve], scores: Sequence[Scores], path: Path) -> None:
    """Perplexity over full depth's. Raises InvalidConfig as `plotting.figure` does."""
    found = {score.name: score for score in scores}
    with figure(path, num_panels=3, width=13.0, columns=3) as panels:
        for panel, axis in zip(panels, ("K", "anchors", "boundary"), strict=True):
            for line in lines:
                if line.axis != axis:
                    continue
                points = [found[text] for text in line.visibilities]
                ratios = [point.ratio for point in points]
                below = [point.ratio - point.ratio_low for point in points]
                above = [point.ratio_high - point.ratio for point in points]
                panel.errorbar(line.values, ratios, yerr=[below, above], label=line.name, marker="o", ms=3, lw=1.2, capsize=2)
            panel.axhline(1.05, color="grey", ls=":", lw=1, label="1.05")
            panel.set_xticks(sorted({value for line in lines if line.axis == axis for value in line.values}))
            panel.set_yscale("log")
            panel.set_yticks([1, 1.2, 1.5, 2, 3, 5, 10], ["1", "1.2", "1.5", "2", "3", "5", "10"])
            panel.minorticks_off()
            panel.set_ylabel("perplexity ÷ full depth's")
            panel.set_xlabel({"K": "prefill depth K", "anchors": "anchors a", "boundary": "boundary b"}[axis])
            panel.grid(alpha=0.3)
            panel.legend(fontsize=7)


def _text(text: str) -> str:
    """The canonical text, which names a score."""
    visibility = Visibility.parse(text)
    assert visibility.kind is not VisibilityKind.FULL
    return str(visibility)
