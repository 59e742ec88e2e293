"""What was measured, and what the formulas say of the same thing. Knows points and machines; measures and fits nothing."""

from dataclasses import dataclass
from statistics import median

from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.request_cost import first_step_s
from shoal.simulator.step_cost import StepCost, StepWork
from shoal.simulator.transfer_cost import Wire, handoff_cost
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one thing, in seconds."""

    seconds: tuple[float, ...]

    @property
    def middle(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """(most − least) / median: the noise that no fit can explain. 0 of a single measurement, which tells none."""
        return (max(self.seconds) - min(self.seconds)) / self.middle if self.middle > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One prompt alone. `prefill` is the worker's compute, `exposed` what the transfer took after it, `other` the rest of TTFT
    as the client saw it: router, reservation, first step, reply."""

    visibility: Visibility
    num_prompt_tokens: int
    prefill: Sample
    exposed: Sample
    other: Sample
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Steps of `batch` requests that all run."""

    visibility: Visibility
    batch: int
    num_prompt_tokens: int
    num_kv_layer_tokens: float  # (token, layer) pairs that a step of the middle reads, all rows together
    step: Sample


@dataclass(frozen=True, slots=True)
class CrowdPoint:
    """Steps of either pool while the other is idle, and while it prefills prompts of one length, one every `interval_s`."""

    num_prompt_tokens: int
    interval_s: float
    step_alone: Sample
    step_beside: Sample
    prefill_alone: Sample
    prefill_beside: Sample


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was measured of one deployment."""

    model: ModelSpec
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    token_budget: int
    crowd: tuple[CrowdPoint, ...] = ()
    notes: tuple[str, ...] = ()  # what was left out, in words


@dataclass(frozen=True, slots=True)
class Residual:
    """One quantity measured and predicted, milliseconds."""

    what: str
    inputs: str
    measured_ms: float
    predicted_ms: float
    spread: float | None  # of the repeats; None: there was one only

    @property
    def error(self) -> float:
        """predicted / measured − 1."""
        return self.predicted_ms / self.measured_ms - 1 if self.measured_ms > 0 else 0.0


def predicted_step_s(cost: StepCost, point: DecodePoint) -> float:
    """Formula 2."""
    return cost.step_s(StepWork(num_rows=point.batch, num_kv_layer_tokens=point.num_kv_layer_tokens))


def residuals(measured: Measured, machine: Machine, wire: Wire) -> list[Residual]:
    """All points beside what the fitted machine and wire give."""
    rows = []
    for point in measured.prefill:
        cost = StepCost(measured.model, machine, point.visibility)
        inputs = f"{point.visibility.policy}, {point.num_prompt_tokens:,} tokens"
        num_prefill = point.visibility.split(point.num_prompt_tokens).num_prefill_tokens
        seconds = cost.prefill_s(num_prefill, chunk_tokens=measured.token_budget)
        exposed = handoff_cost(cost, wire, point.num_prompt_tokens, chunk_tokens=measured.token_budget).exposed_s
        rows.append(_row("exposed transfer", f"{inputs}, {point.wire_bytes / 1e6:.2f} MB", point.exposed, exposed))
        first = first_step_s(cost, point.num_prompt_tokens) + machine.profile.request_s
        both = Sample(tuple(a + b for a, b in zip(point.prefill.seconds, point.other.seconds, strict=True)))
        rows.append(_row("TTFT but for the transfer", inputs, both, seconds + first))
    for each in measured.decode:
        seconds = predicted_step_s(StepCost(measured.model, machine, each.visibility), each)
        inputs = f"{each.visibility.policy}, {each.batch} × {each.num_prompt_tokens:,} tokens"
        rows.append(_row("decode step", inputs, each.step, seconds))
    return rows


def _row(what: str, inputs: str, sample: Sample, predicted_s: float) -> Residual:
    return Residual(what, inputs, 1e3 * sample.middle, 1e3 * predicted_s, sample.spread if len(sample.seconds) > 1 else None)
