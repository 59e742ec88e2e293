"""The picture of a run: held-out perplexity over the tokens seen, between untuned and full depth. Knows no training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import InvalidConfig
from shoal.model_files.adapter import ADAPTER_NOTES
from shoal.model_files.safetensors_files import read_json
from shoal.quality.plotting import figure


def draw_curve(adapter: Path, path: Path) -> None:
    """Draw the curve that is in an adapter's notes. Raises InvalidConfig when none was measured, or as `plotting.figure` does."""
    notes = read_json(adapter / ADAPTER_NOTES)
    curve = notes.get("curve")
    if not isinstance(curve, Sequence) or not curve:
        raise InvalidConfig(f"{adapter} holds no curve: tune with --held-out to have one measured")
    with figure(path, num_panels=2) as (by_tokens, by_time):
        _draw(by_tokens, curve, [point["tokens"] / 1e3 for point in curve], "thousand tokens", notes)
        _draw(by_time, curve, [point["cpu_s"] / 60 for point in curve], "minutes of CPU of one process", notes)


def _draw(panel: Any, curve: Sequence[Mapping[str, Any]], values: Sequence[float], label: str, notes: Mapping[str, Any]) -> None:
    perplexities = [point["perplexity"] for point in curve]
    panel.plot(values, perplexities, marker="o", label=f"{notes['visibility']}, tuned")
    panel.axhline(perplexities[0], color="grey", linestyle=":", label=f"untuned: {perplexities[0]:.2f}")
    if (full := curve[0].get("full_depth_perplexity")) is not None:
        panel.axhline(full, color="black", linestyle="--", label=f"full depth, untuned: {full:.2f}")
    panel.set_xlabel(label)
    panel.set_ylabel("perplexity of held-out responses")
    panel.legend()
