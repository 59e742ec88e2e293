"""From measured points to a profile: non-negative least squares on relative errors. Knows formulas 1, 2 and 4; measures nothing.

Formulas 1 and 2 are linear in seconds per FLOP, per byte, per row and per step once it is known which side of each max() a step
is on; that is decided by the fit before, until nothing changes. One model on one machine cannot tell t_layer from n_half (both
grow with depth and chunks), nor a decode step's constant part from its weight reads: t_layer is left at 0, and what prefill does
not explain as t_step counts as weight reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from shoal.errors import InvalidConfig
from shoal.simulator.calibration.least_squares import non_negative
from shoal.simulator.calibration.points import DecodePoint, Measured, PrefillPoint
from shoal.simulator.hardware import Gpu, Link
from shoal.simulator.machine import Machine
from shoal.simulator.profiles import Profile
from shoal.simulator.request_cost import first_step_s
from shoal.simulator.step_cost import StepCost, chunks
from shoal.simulator.transfer_cost import Wire, handoff_cost

_UNKNOWNS = ("linear", "half", "attention", "step", "weights", "kv", "row", "prompt")
_ROUNDS = 20
_LEAST_S = 1e-3  # exposed transfers below are weighed as if they took this long
_LEAST_CROWDING = 0.03  # less is taken for noise
_FASTEST = 1e15  # FLOP/s or bytes/s of what no point could tell from nothing


@dataclass(frozen=True, slots=True)
class Fit:
    """A machine, a link and what could not be told from the points, in words."""

    gpu: Gpu
    link: Link
    profile: Profile
    notes: tuple[str, ...]

    @property
    def machine(self) -> Machine:
        return Machine(self.gpu, self.profile)

    @property
    def wire(self) -> Wire:
        return Wire.of(self.link, self.machine)


@dataclass(frozen=True, slots=True)
class _Part:
    """A max() of a point: what it costs as linear work and as weight reads (coefficients of the unknowns)."""

    linear: dict[str, float]
    weights: dict[str, float]


def fit(measured: Measured, *, name: str, source: str, gpu: Gpu | None, link: Link | None, memory_bytes: float) -> Fit:
    """Fit all constants. `gpu` and `link` are what shares refer to; None: their nominal figures become the fitted rates.

    Raises InvalidConfig when there are too few points, or a rate lies above the nominal figure it should be a share of.
    """
    if len({point.num_prompt_tokens for point in measured.prefill}) < 2:
        raise InvalidConfig("prompts of one length only cannot tell a rate from an overhead; measure at least two lengths")
    if len({(point.batch, point.num_prompt_tokens) for point in measured.decode}) < 2:
        raise InvalidConfig("one batch at one context only cannot tell weight reads from KV reads; measure at least two")
    notes = list(measured.notes)
    seconds = _solve(measured)
    if not seconds["linear"]:
        words = f"no time per prompt token could be told from noise and overheads: {_extremes(measured)}"
        raise InvalidConfig(f"{words}; measure longer prompts (--lengths), more repeats, on a quieter machine")
    for unknown, words in (("attention", "attention of prompts"), ("kv", "KV reads"), ("weights", "weight reads")):
        if not seconds[unknown]:
            notes.append(f"{words} could not be told from nothing: taken as free; measure longer contexts or larger batches")
    rates = {unknown: 1 / value if value else _FASTEST for unknown, value in seconds.items()}
    flops = min(max(rates["linear"], rates["attention"] if seconds["attention"] else 0.0), _FASTEST)
    memory = max((rates[key] for key in ("weights", "kv") if seconds[key]), default=_FASTEST)
    if gpu is None:
        gpu = Gpu(name, flops, memory_bytes, memory, memory, memory, None, source)
    profile = Profile(
        name=name,
        source=source,
        gemm=_share(rates["linear"], gpu.flops, gpu, "linear layers"),
        attention=_share(rates["attention"], gpu.flops, gpu, "attention") if seconds["attention"] else 1.0,
        weight_read=_share(rates["weights"], gpu.memory_bytes_per_s, gpu, "weight reads") if seconds["weights"] else 1.0,
        kv_read=_share(rates["kv"], gpu.memory_bytes_per_s, gpu, "KV reads") if seconds["kv"] else 1.0,
        link=1.0,
        num_half_tokens=seconds["half"] / seconds["linear"],
        step_s=seconds["step"],
        row_s=seconds["row"],
        request_s=seconds["prompt"],
        memory=1.0,
    )
    profile = replace(profile.changed(**_crowding(measured)), name=name)
    return _with_transfers(
        measured, Fit(gpu, link or Link(name, _FASTEST, 0.0, source), profile, tuple(notes)), is_given=bool(link)
    )


def _crowding(measured: Measured) -> dict[str, float]:
    """What the pools take from each other, where it is more than the noise.

    Of decode's time, 1 − alone / beside is lost: crowd_decode of the time that prefill steps, and join_s for each request.
    """
    if not measured.crowd:
        return {}
    rows, lost = [], []
    for point in measured.crowd:
        share = 1 - point.step_alone.middle / point.step_beside.middle
        lost.append(share if share > max(_LEAST_CROWDING, point.step_alone.spread / 2) else 0.0)
        rows.append([min(1.0, point.prefill_beside.middle / point.interval_s), 1 / point.interval_s])
    crowd_decode, join_s = map(float, non_negative(np.array(rows), np.array(lost)))
    longer = [point.prefill_beside.middle / point.prefill_alone.middle - 1 for point in measured.crowd]
    noise = max(_LEAST_CROWDING, *(point.prefill_alone.spread / 2 for point in measured.crowd))
    crowd_prefill = median(longer)
    return {"crowd_decode": crowd_decode, "join_s": join_s, "crowd_prefill": crowd_prefill if crowd_prefill > noise else 0.0}


def _extremes(measured: Measured) -> str:
    """What the shortest and the longest prompt took, in words."""
    ordered = sorted(measured.prefill, key=lambda point: point.num_prompt_tokens)
    texts = []
    for point in (ordered[0], ordered[-1]):
        sample = point.prefill
        spread = f" (repeats differ by {100 * sample.spread:.0f}%)" if len(sample.seconds) > 1 else ""
        texts.append(f"{point.num_prompt_tokens} tokens took {1e3 * sample.middle:.0f} ms{spread}")
    return " and ".join(texts)


def _solve(measured: Measured) -> dict[str, float]:
    """Seconds per FLOP, per byte, per row and per step."""
    machine = Machine(Gpu("", 1.0, 1.0, 1.0, 1.0, 1.0, None, ""), Profile("", "", 1.0, 1.0, 1.0, 1.0))
    shown = {point.visibility for point in measured.prefill} | {point.visibility for point in measured.decode}
    costs = {visibility: StepCost(measured.model, machine, visibility) for visibility in shown}
    points = [(_prefill_parts(costs[p.visibility], p, measured.token_budget), p.prefill.middle) for p in measured.prefill]
    points += [(_decode_parts(costs[p.visibility], p), p.step.middle) for p in measured.decode]
    is_linear = [[True] * len(parts) if index < len(measured.prefill) else [False] * len(parts)
                 for index, ((parts, _), _) in enumerate(points)]  # fmt: skip
    seconds: dict[str, float] = {}
    for _ in range(_ROUNDS):
        rows = []
        for ((parts, rest), taken), sides in zip(points, is_linear, strict=True):
            row = dict.fromkeys(_UNKNOWNS, 0.0)
            for coefficients in [rest, *(part.linear if side else part.weights for part, side in zip(parts, sides, strict=True))]:
                for unknown, value in coefficients.items():
                    row[unknown] += value
            rows.append([row[unknown] / taken for unknown in _UNKNOWNS])
        found = non_negative(np.array(rows), np.ones(len(rows)))
        seconds = dict(zip(_UNKNOWNS, map(float, found), strict=True))
        now = [[_worth(part.linear, seconds) >= _worth(part.weights, seconds) for part in parts] for (parts, _), _ in points]
        if now == is_linear:
            break
        is_linear = now
    return seconds


def _worth(coefficients: dict[str, float], seconds: dict[str, float]) -> float:
    return sum(value * seconds[unknown] for unknown, value in coefficients.items())


def _prefill_parts(cost: StepCost, point: PrefillPoint, token_budget: int) -> tuple[list[_Part], dict[str, float]]:
    """Formula 1 of every chunk, without t_layer."""
    model, parts = cost.model, []
    num_prefill = point.visibility.split(point.num_prompt_tokens).num_prefill_tokens
    sizes = [sum(model.active_weights(layer) for layer in range(cost.depth))]
    if cost.projects_early:
        sizes.append(cost.num_upper * model.kv_projection_weights)
    pairs = 0
    steps = chunks(0, num_prefill, token_budget)
    for start, stop in steps:
        pairs += cost.lower_pairs(start, stop)
        for weights in sizes:
            linear = {"linear": 2.0 * (stop - start) * weights, "half": 2.0 * weights}
            parts.append(_Part(linear, {"weights": weights * model.weight_bytes}))
    return parts, {"attention": float(pairs * model.attention_pair_flops), "step": float(len(steps)), "prompt": 1.0}


def _decode_parts(cost: StepCost, point: DecodePoint) -> tuple[list[_Part], dict[str, float]]:
    """Formula 2, without t_layer."""
    model = cost.model
    weights = sum(model.active_weights(layer) for layer in range(model.shape.num_layers)) + model.head_weights
    part = _Part({"linear": 2.0 * point.batch * weights}, {"weights": weights * model.weight_bytes})
    rest = {"kv": point.num_kv_layer_tokens * model.kv_token_bytes, "step": 1.0, "row": float(point.batch)}
    return [part], rest


def _with_transfers(measured: Measured, fitted: Fit, *, is_given: bool) -> Fit:
    """Add t_handoff, the link's rate and t_request. A message's own time counts as hand-off."""
    taken = [point.exposed.middle for point in measured.prefill]
    weights = [1 / max(seconds, _LEAST_S) for seconds in taken]
    needed = max(point.wire_bytes / (point.prefill.middle + point.exposed.middle) for point in measured.prefill)

    def judged(rate: float) -> tuple[float, float]:
        """(Weighted squares, best t_handoff) when bytes leave at this rate, by formula 4."""
        wire = replace(
            fitted.wire, link=replace(fitted.link, bytes_per_s=rate, latency_s=0.0), efficiency=1.0, handoff_s=0.0, message_s=0.0
        )
        streamed = [
            handoff_cost(
                StepCost(measured.model, fitted.machine, point.visibility),
                wire,
                point.num_prompt_tokens,
                chunk_tokens=measured.token_budget,
            )
            for point in measured.prefill
        ]
        over = [seconds - cost.exposed_s for seconds, cost in zip(taken, streamed, strict=True)]
        handoff_s = max(0.0, sum(w * w * each for w, each in zip(weights, over, strict=True)) / sum(w * w for w in weights))
        return sum((w * (each - handoff_s)) ** 2 for w, each in zip(weights, over, strict=True)), handoff_s

    rates = [needed * 1.1**step for step in range(-20, 100)]
    squares = [judged(rate)[0] for rate in rates]
    best = min(range(len(rates)), key=squares.__getitem__)
    notes, link, rate, share = list(fitted.notes), fitted.link, rates[best], 1.0
    is_told = squares[-1] > squares[best] * 1.02 + 1e-9
    if is_told:
        rate = min((rates[best] * 1.01**step for step in range(-10, 11)), key=lambda each: judged(each)[0])
    else:
        rate = 10 * needed
        notes.append(
            f"transfers hid behind prefill at every size: the link is taken as {8e-9 * rate:.3g} Gb/s, ten times their need"
        )
    handoff_s = judged(rate)[1]
    if is_given:
        share = _share(rate, link.bytes_per_s, link, "transfers") if is_told else 1.0
    else:
        link = replace(link, bytes_per_s=rate)
    request_s = median(
        each.other.middle - first_step_s(StepCost(measured.model, fitted.machine, each.visibility), each.num_prompt_tokens)
        for each in measured.prefill
    )
    request_s = max(0.0, request_s) + fitted.profile.request_s  # what a prompt takes of prefill's queue, whatever its length
    profile = fitted.profile.changed(link=share, handoff_s=handoff_s, transfer_step_s=0.0, request_s=request_s)
    return Fit(fitted.gpu, link, replace(profile, name=fitted.profile.name), tuple(notes))


def _share(rate: float, nominal: float, of: Gpu | Link, what: str) -> float:
    if rate > nominal * 1.001:
        raise InvalidConfig(
            f"{what} reach {rate / nominal:.2f} times the nominal figure of {of.name}; name the hardware that was measured"
        )
    return min(1.0, rate / nominal)


def notes_on_noise(samples: Sequence[tuple[str, float | None]], limit: float) -> list[str]:
    """A warning for each quantity whose repeats lie further apart than `limit` of their median."""
    noisy = [(what, spread) for what, spread in samples if spread is not None and spread > limit]
    return [f"{what}: repeats differ by {100 * spread:.0f}%" for what, spread in sorted(noisy, key=lambda each: -each[1])]
