"""Which shallow visibilities keep to the quality band here, and which are served at full depth meanwhile. Sends nothing.

One per router: each judges by its own replays (router/shadow.py). The rule itself is placement/quality_band.py.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from shoal.config.logs import log_event
from shoal.config.shadow import ShadowConfig
from shoal.pb.v1 import shoal_pb2
from shoal.placement.quality_band import Bound, Comparison, Readings, Standing, bound_left, is_trusted_again, read
from shoal.router import instruments
from shoal.visibility import Visibility, VisibilityKind

_log = logging.getLogger(__name__)
_OFF: Final = ShadowConfig()


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why requests of a visibility are served at full depth."""

    bound: Bound
    notice: str  # for the response


class _Gate:
    """One visibility's."""

    def __init__(self, policy: str, config: ShadowConfig) -> None:
        self.policy = policy
        self.fallback: Fallback | None = None
        self.fell_at = 0.0
        self.num_replaced = 0
        self.window: deque[Comparison] = deque(maxlen=config.window)
        self._config = config
        for measure in (instruments.QUALITY_STATE, instruments.QUALITY_KL, instruments.QUALITY_SAMPLES):
            measure.labels(policy).set(0)
        instruments.QUALITY_AGREEMENT.labels(policy).set(1)

    @property
    def readings(self) -> Readings:
        return read(self.window)

    def take(self, sample: Comparison, now: float) -> None:
        self.window.append(sample)
        instruments.SHADOW_TOKENS.labels(self.policy).inc(sample.num_tokens)
        instruments.SHADOW_AGREEING.labels(self.policy).inc(sample.num_agreeing)
        instruments.SHADOW_KL.labels(self.policy).inc(sample.kl_nats)
        readings = self.readings
        instruments.QUALITY_AGREEMENT.labels(self.policy).set(readings.agreement)
        instruments.QUALITY_KL.labels(self.policy).set(readings.kl_nats)
        if self.fallback is not None:
            if is_trusted_again(self._config, readings, now - self.fell_at):
                self._move(Standing.SERVED, self.fallback.bound, readings)
                self.fallback = None
        elif (bound := bound_left(self._config, readings)) is not None:
            self._move(Standing.FULL, bound, readings)
            self.fallback, self.fell_at = Fallback(bound, self._words(bound, readings)), now
        instruments.QUALITY_SAMPLES.labels(self.policy).set(len(self.window))

    def _move(self, standing: Standing, bound: Bound, readings: Readings) -> None:
        instruments.QUALITY_STATE.labels(self.policy).set(standing is Standing.FULL)
        instruments.QUALITY_TRANSITIONS.labels(self.policy, standing, bound).inc()
        fell = standing is Standing.FULL
        log_event(
            _log, logging.ERROR if fell else logging.WARNING, "quality gate: served at full depth" if fell else
            "quality gate: served as asked again", visibility=self.policy, bound=bound, agreement=readings.agreement,
            kl_nats=readings.kl_nats, samples=readings.num_samples, tokens=readings.num_tokens,
            min_agreement=self._config.min_agreement, max_kl=self._config.max_kl,
        )  # fmt: skip
        self.window.clear()

    def _words(self, bound: Bound, readings: Readings) -> str:
        found = f"{readings.agreement:.1%} of tokens agreed with full depth, the band asks for {self._config.min_agreement:.1%}"
        if bound is Bound.KL:
            found = f"the divergence was {readings.kl_nats:.3f} nats per token, the band allows {self._config.max_kl:g}"
        return f"visibility {self.policy} was replaced by full: in the last {readings.num_samples} requests replayed {found}"


class QualityGates:
    """Of all shallow visibilities that requests may ask for. With no rate it holds none, and nothing is ever replaced."""

    def __init__(
        self, config: ShadowConfig = _OFF, policies: Iterable[Visibility] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`policies`: resolved for the model, without boundaries. Raises InvalidConfig when nothing can be compared."""
        policies = tuple(policies)
        config.check_policies(policies)
        self._clock = clock
        shallow = [policy for policy in policies if policy.kind is not VisibilityKind.FULL] if config.rate else []
        self._gates = {str(policy): _Gate(str(policy), config) for policy in shallow}

    def take(self, policy: str, sample: Comparison) -> None:
        """A replay of a request that asked for `policy` was measured."""
        self._gates[policy].take(sample, self._clock())

    def fallback(self, visibility: Visibility) -> Fallback | None:
        """Why a request for this visibility, resolved, is to be served at full depth; None when it is not. Counts nothing."""
        gate = self._gates.get(str(visibility.policy))
        return gate.fallback if gate is not None else None

    def replaced(self, visibility: Visibility) -> None:
        """A request for it is served at full depth."""
        gate = self._gates[str(visibility.policy)]
        gate.num_replaced += 1
        instruments.QUALITY_REPLACED.labels(gate.policy).inc()

    def report(self) -> list[shoal_pb2.VisibilityQuality]:
        """What each gate has found, for GetServerInfo."""
        found = []
        for gate in self._gates.values():
            readings, fallback = gate.readings, gate.fallback
            found.append(
                shoal_pb2.VisibilityQuality(
                    visibility=gate.policy,
                    state=Standing.SERVED if fallback is None else Standing.FULL,
                    reason="" if fallback is None else fallback.bound,
                    num_samples=readings.num_samples,
                    num_tokens=readings.num_tokens,
                    agreement=readings.agreement,
                    kl_nats=readings.kl_nats,
                    num_replaced_requests=gate.num_replaced,
                )
            )
        return found
