"""How long a pool's workers take, as the predicted need asks for it. Knows seconds of steps; knows no model and no load.

Two kinds answer: the simulator's cost model on a calibrated profile (`simulator/service.py`), and, where there is none, what the
workers themselves report of their steps (`MeasuredService`).
"""

from typing import Final, Protocol

_HALF_LIFE_S: Final = 120.0  # of stepping, or of waiting for more of it
_ROW_SHARE: Final = 0.1  # assumed of a step, per row, until batches of different sizes have been seen
_DOUBT: Final = 0.25  # of the mean batch: how much spread it takes to outweigh the assumption


class ServiceModel(Protocol):
    """0.0 where nothing is known yet."""

    @property
    def source(self) -> str:
        """`profile` or `measured`."""

    @property
    def steps_hold_prompts(self) -> bool:
        """Whether `step_s` already has in it what prompts take that decode workers prefill themselves."""

    def prefill_s(self, num_tokens: float) -> float:
        """Of one prompt of so many prefill tokens on a prefill worker, alone."""

    def step_s(self, num_rows: int, pairs_per_row: float = 0.0) -> float:
        """Of one decode step of so many requests, each of which reads so many (token, layer) pairs of KV."""


class MeasuredService:
    """Learns from reports: seconds per prefill token, and a decode step as a + b · rows by least squares over faded samples."""

    source = "measured"
    steps_hold_prompts = True

    def __init__(self) -> None:
        self._tokens = self._token_s = 0.0
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    def prefilled(self, num_tokens: float, seconds: float) -> None:
        """Steps of a prefill worker have run so many tokens."""
        kept = 0.5 ** (seconds / _HALF_LIFE_S)
        self._tokens, self._token_s = kept * self._tokens + num_tokens, kept * self._token_s + seconds

    def decoded(self, num_steps: int, num_rows: float, seconds: float) -> None:
        """Steps of a decode worker have run, with so many rows and seconds together."""
        if num_steps <= 0:
            return
        kept = 0.5 ** (seconds / _HALF_LIFE_S)
        x, y = num_rows / num_steps, seconds / num_steps
        fresh = (num_steps, num_steps * x, num_steps * y, num_steps * x * x, num_steps * x * y)
        old = (self._w, self._x, self._y, self._xx, self._xy)
        self._w, self._x, self._y, self._xx, self._xy = (kept * a + b for a, b in zip(old, fresh, strict=True))

    def prefill_s(self, num_tokens: float) -> float:
        return num_tokens * self._token_s / self._tokens if self._tokens else 0.0

    def step_s(self, num_rows: int, pairs_per_row: float = 0.0) -> float:
        if not self._w:
            return 0.0
        x, y = self._x / self._w, self._y / self._w
        variance, covariance = max(0.0, self._xx / self._w - x * x), self._xy / self._w - x * y
        assumed = y * _ROW_SHARE / (1 + _ROW_SHARE * x)
        doubt = (_DOUBT * x) ** 2
        slope = max(0.0, (covariance + doubt * assumed) / (variance + doubt)) if doubt else assumed
        slope = min(slope, y / x if x else slope)  # a step of no rows takes no less than no time
        return y + slope * (num_rows - x)
