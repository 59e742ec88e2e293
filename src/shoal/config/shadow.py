"""What the quality gate is told: how many requests are replayed at full depth, and which band they must keep to.

Knows no request; placement/quality_band.py applies it, router/shadow.py runs the replays. docs/quality_gate.md explains.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from shoal.errors import InvalidConfig
from shoal.visibility import Visibility, VisibilityKind


@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """Raises InvalidConfig for values that mean nothing, or contradict each other. By itself it replays nothing."""

    rate: float = 0.0  # share of finished requests of shallow visibilities; 0: none
    min_agreement: float = 0.0  # share of tokens; below it requests are served at full depth. 0: no bound
    max_kl: float = 0.0  # nats per token; above it, the same. 0: no bound
    window: int = 200  # replayed requests that are judged together, the latest
    min_samples: int = 50  # below so many nothing is judged
    hysteresis: float = 0.2  # how far inside the band quality must be to be trusted again; share of the way to perfect
    cool_down_s: float = 300.0  # requests are served at full depth for so long at least

    def __post_init__(self) -> None:
        for name in ("rate", "min_agreement", "hysteresis"):
            if not 0 <= getattr(self, name) <= 1:  # also refuses NaN
                raise InvalidConfig(f"shadow_{name} must lie in [0, 1], not {getattr(self, name)}")
        for name in ("max_kl", "cool_down_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidConfig(f"shadow_{name} must be a finite number, 0 or more, not {getattr(self, name)}")
        for name in ("window", "min_samples"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"shadow_{name} must be at least 1, not {getattr(self, name)}")
        if self.min_samples > self.window:
            raise InvalidConfig(
                f"shadow_min_samples {self.min_samples} can never be reached in a shadow_window of {self.window}; lower it, or "
                f"widen the window"
            )
        if not self.rate:
            for name in ("min_agreement", "max_kl"):
                if getattr(self, name):
                    raise InvalidConfig(
                        f"shadow_{name} {getattr(self, name)} has no effect while nothing is replayed; set shadow_rate, say 0.01"
                    )

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """From settings with the prefix `shadow_`; others are left alone. Raises InvalidConfig."""
        return cls(**{field.name: settings[f"shadow_{field.name}"] for field in dataclasses.fields(cls)})

    def check_policies(self, policies: Collection[Visibility]) -> None:
        """`policies`: what requests may ask for, resolved for the model. Raises InvalidConfig when nothing can be compared."""
        if not self.rate:
            return
        allowed = ",".join(str(policy) for policy in policies)
        kinds = {policy.kind for policy in policies}
        if VisibilityKind.FULL not in kinds:
            raise InvalidConfig(
                f"shadow_rate {self.rate} replays requests at full depth, which visibilities {allowed} do not allow; add full"
            )
        if kinds == {VisibilityKind.FULL}:
            raise InvalidConfig(
                f"shadow_rate {self.rate} compares shallow visibilities with full depth, and visibilities {allowed} name none; "
                f"add one, as in full,speed:22, or leave shadow_rate out"
            )
