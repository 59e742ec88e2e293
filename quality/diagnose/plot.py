"""A diagnosis as a picture of four panels. Knows no model."""

import math
from pathlib import Path

from shoal.quality.diagnose.report import Diagnosis
from shoal.quality.plotting import figure


def draw(diagnosis: Diagnosis, path: Path) -> None:
    """Raises InvalidConfig without matplotlib, and for a path that cannot be written."""
    layers, at = diagnosis.layers, [layer.layer for layer in diagnosis.layers]
    with figure(path, num_panels=4) as (importance, mass, drift, cost):
        lines = (
            ("prefill tokens", "tab:blue", [layer.prefill for layer in layers]),
            ("decode tokens", "tab:red", [layer.decode for layer in layers]),
        )
        for name, colour, values in lines:
            errors = [value.layer_error for value in values]
            shown = [value.layer or math.nan for value in values]  # the last layer's of prompts is 0: not on this axis
            importance.errorbar(at, shown, yerr=errors, label=name, color=colour, marker="o", ms=3, lw=1.2)
        importance.plot(at, [layer.sight for layer in layers], label="sight of the prompt", color="tab:green", ls="--", lw=1.2)
        importance.set_yscale("log")
        importance.set_ylabel("loss increase, nats/token")
        importance.set_title("Virtual-gate importance: removing one layer for one phase", fontsize=9)
        shares = [
            [layer.mass_on_anchor for layer in layers],
            [layer.mass_on_prompt for layer in layers],
            [layer.mass_on_decode for layer in layers],
        ]
        mass.stackplot(at, shares, labels=["first token (anchor)", "other prompt tokens", "decode tokens"], alpha=0.75)
        mass.set_ylim(0, 1)
        mass.set_ylabel("share of attention")
        mass.set_title("Where response tokens look", fontsize=9)
        drift.plot(at, [layer.prefill_drift for layer in layers], label="prefill tokens: in → out", marker="o", ms=3, lw=1.2)
        drift.plot(at, [layer.decode_drift for layer in layers], label="response tokens: in → out", marker="o", ms=3, lw=1.2)
        drift.plot(at, [1 - layer.prefill_to_last for layer in layers], label="prefill tokens: out → last layer", ls="--", lw=1.2)
        drift.set_ylabel("1 − cosine")
        drift.set_title("Representation drift", fontsize=9)
        for own, colour in zip(diagnosis.recommendations, ("tab:blue", "tab:green"), strict=True):
            depths = range(1, len(own.predicted_costs) - 1)
            cost.plot(
                depths, [own.predicted_costs[k] or math.nan for k in depths], color=colour, lw=1.2, label=f"{own.kind}, predicted"
            )
            seen = sorted(own.measured_ratios)
            losses = [math.log(own.measured_ratios[k]) for k in seen]
            cost.plot(seen, losses, color=colour, ls="none", marker="s", ms=4, label=f"{own.kind}, measured")
            cost.axhline(math.log(own.tolerance), color="grey", ls=":", lw=1)
        cost.set_ylim(bottom=1e-3)
        cost.set_yscale("log")
        cost.set_ylabel("loss increase, nats/token")
        cost.set_title("Cost of prefill depth K (dotted: the tolerance)", fontsize=9)
        for panel in (importance, mass, drift, cost):
            panel.set_xlabel("K" if panel is cost else "layer")
            panel.legend(fontsize=7)
            panel.grid(alpha=0.3)
