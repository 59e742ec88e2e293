"""Scales the pools apart, by predicted need: looks, decides by placement's rule, orders. Knows the controller and no Ray."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.config.autoscale import AutoscaleConfig, Bounds
from shoal.config.logs import log_event
from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool
from shoal.controller.decisions import Decision, DecisionBoard
from shoal.controller.endpoints import EndpointBoard
from shoal.controller.machines import Held, Machines
from shoal.controller.pools import PoolChange
from shoal.controller.readings import PoolWatch, Told, ask
from shoal.errors import AlreadyExists, CapacityExceeded, ShoalError
from shoal.metrics import counter, gauge
from shoal.placement.autoscale import AutoscalePolicy, Need, PoolDemand, ScaleState, scale
from shoal.placement.need import DecodeReadings, PrefillReadings, Targets, decode_demand, largest_batch, prefill_demand
from shoal.placement.service import MeasuredService, ServiceModel
from shoal.rpc import ClusterLink
from shoal.visibility import Visibility

_log = logging.getLogger(__name__)

_NEEDED = gauge("shoal_controller_needed_workers", "Predicted need, before bounds and cool-downs", ("pool", "by"))
_FORECAST = gauge("shoal_controller_forecast_requests", "Requests per second expected when a new worker would serve", ("pool",))
_UTILISATION = gauge("shoal_controller_utilisation_ratio", "Predicted work over what the pool's workers can do", ("pool",))
_DECISIONS = counter(
    "shoal_controller_scaling_transitions_total", "Looks of autoscaling, by what was decided", ("pool", "decision")
)
_FAILURES = counter(
    "shoal_controller_scaling_failed_transitions_total", "Decisions that could not be carried out", ("pool", "reason")
)


class Scalable(Protocol):
    """The controller, as far as scaling goes."""

    def set_pool_sizes(
        self, sizes: Mapping[Pool, int], *, drain_s: float | None = None, allow_pending: bool = False
    ) -> PoolChange: ...
    def num_workers(self, pool: Pool) -> int: ...
    def held(self, pool: Pool) -> Held: ...


@dataclass(slots=True)
class _Scaled:
    """A pool that scales."""

    bounds: Bounds
    watch: PoolWatch
    state: ScaleState
    size: int | None = None  # at the end of the last look


class Autoscaler:
    """`run` until cancelled. `decisions` tells what it does and why. Without `service` the pace is learned from reports."""

    def __init__(
        self,
        config: ServeConfig,
        pools: Scalable,
        board: EndpointBoard,
        link: ClusterLink,
        machines: Machines,
        service: ServiceModel | None = None,
    ) -> None:
        self.decisions = DecisionBoard()
        self._settings: AutoscaleConfig = config.autoscale
        self._is_dry_run = config.autoscale_dry_run
        self._block_size = config.block_size
        self._visibility = Visibility.parse(config.visibilities[0])
        self._pools, self._board, self._link, self._machines = pools, board, link, machines
        measured = MeasuredService()
        self._service: ServiceModel = service or measured
        self._targets = Targets(self._settings.ttft_s, self._settings.tpot_s, self._settings.quantile)
        bounds = {pool: found for pool in config.pools if (found := config.autoscale_bounds(pool)) is not None}
        self._watches = {pool: PoolWatch(pool, measured) for pool in config.pools}  # the other pool tells the pace too
        self._scaled = {pool: _Scaled(each, self._watches[pool], ScaleState()) for pool, each in bounds.items()}
        self._looked_at: float | None = None

    async def run(self) -> None:
        """Look again and again. What fails is told and tried again at the next look."""
        loop = asyncio.get_running_loop()
        while True:
            began_at = loop.time()
            [failure] = await asyncio.gather(self.look(), return_exceptions=True)
            if failure is not None:  # a bug; it must not end scaling
                for pool in self._scaled:
                    _FAILURES.labels(pool, "internal").inc()
                _log.error("a look of autoscaling failed, the next one is tried", exc_info=failure)
            await asyncio.sleep(max(0.0, self._settings.interval_s - (loop.time() - began_at)))

    async def look(self) -> None:
        """Ask every worker, then decide for each pool that scales and carry it out."""
        now = asyncio.get_running_loop().time()
        seconds = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        told = {}
        for pool, watch in self._watches.items():
            told[pool] = await ask(self._board.ready(pool), self._link, self._settings.interval_s)
            watch.saw(told[pool], seconds)
        for pool, scaled in self._scaled.items():
            decision = await self._decide(pool, scaled, told[pool], now)
            scaled.size = self._pools.num_workers(pool)
            self._tell(decision)
        if not self._is_dry_run:
            await self._settle()

    async def _decide(self, pool: Pool, scaled: _Scaled, told: list[Told], now: float) -> Decision:
        num_workers = self._pools.num_workers(pool)
        if scaled.size is not None and scaled.size != num_workers:  # by order of somebody else, or one was given up
            scaled.state = ScaleState(last_up_s=now)
        policy = self._policy(scaled.bounds)
        if not told and num_workers >= policy.min_workers:
            return self._decision(pool, scaled.bounds, "hold", ("no_report",), num_workers, Need(), num_workers)
        demand, seen = self._demand(pool, scaled.watch, told)
        found = scale(policy, demand, num_workers, now, scaled.state)
        _UTILISATION.labels(pool).set(demand.offered_per_s / num_workers if num_workers else 0.0)
        _FORECAST.labels(pool).set(seen["forecast_per_s"])
        size, because, message = found.num_workers, tuple(map(str, found.because)), ""
        if size != num_workers and not self._is_dry_run:
            size, why, message = await self._order(pool, num_workers, size)
            because = (*because, *why)
        if size == found.num_workers or self._is_dry_run:
            scaled.state = found.state
        word = "grow" if size > num_workers else "shrink" if size < num_workers else "hold"
        return self._decision(pool, scaled.bounds, word, because, num_workers, found.need, size, seen, message)

    async def _order(self, pool: Pool, num_workers: int, wanted: int) -> tuple[int, tuple[str, ...], str]:
        """Bring the pool to this size, or as near as there is room: the size it gets, why not more, and in whose words."""
        try:
            most = await self._machines.most(pool)
            size = wanted if most is None else min(wanted, max(most, num_workers))
            why, words = (("machines",), f"no more than {most} machines") if size < wanted else ((), "")
            for smaller in range(size, num_workers, -1):
                try:
                    self._pools.set_pool_sizes({pool: smaller}, allow_pending=self._machines.may_come)
                    return smaller, why, words
                except CapacityExceeded as error:
                    why, words = ("no_room",), str(error)
            if wanted < num_workers:
                self._pools.set_pool_sizes({pool: wanted})
                return wanted, (), ""
            return num_workers, why, words
        except AlreadyExists as error:
            return num_workers, ("restarting",), str(error)
        except ShoalError as error:
            return num_workers, ("failed",), str(error)

    async def _settle(self) -> None:
        held = {pool: self._pools.held(pool) for pool in self._scaled}
        try:
            await self._machines.settle(held)
        except ShoalError as error:
            for pool in self._scaled:
                _FAILURES.labels(pool, "machines").inc()
            _log.warning("machines are not as they should be, and will be looked at again: %s", error)

    def _policy(self, bounds: Bounds) -> AutoscalePolicy:
        settings = self._settings
        return AutoscalePolicy(
            bounds.min_workers,
            bounds.max_workers,
            settings.target_utilisation,
            settings.target_occupancy,
            settings.backlog_s,
            settings.up_cooldown_s,
            settings.down_cooldown_s,
            settings.hysteresis,
        )

    def _demand(self, pool: Pool, watch: PoolWatch, told: list[Told]) -> tuple[PoolDemand, dict[str, float]]:
        """And what it was made of, for people to see."""
        ahead_s, service, targets = self._settings.start_s, self._service, self._targets
        readings: PrefillReadings | DecodeReadings
        if pool is Pool.PREFILL:
            layers = max((worker.fingerprint.num_layers for worker in self._board.ready(pool)), default=1)
            readings = watch.prefill(told, ahead_s, self._visibility.depth(max(1, layers)))
            demand = prefill_demand(readings, service, targets)
            own = {
                "prompt_tokens": readings.prompts.mean,
                "prompt_s": service.prefill_s(readings.prompts.mean),
                "waiting_tokens": readings.waiting_tokens,
            }
        else:
            readings = watch.decode(told, ahead_s, self._block_size)
            demand = decode_demand(readings, service, targets)
            batch = largest_batch(service, targets.tpot_s, readings.max_rows, readings.pairs_per_row)
            own = {
                "answer_tokens": readings.answers.mean,
                "local_prompt_tokens": readings.prompts.mean,
                "rows": readings.num_rows,
                "batch": batch,
                "batch_step_s": service.step_s(batch, readings.pairs_per_row),
                "waiting": readings.num_waiting,
            }
        return demand, {
            "arrivals_per_s": watch.history.forecast.now_per_s,
            "forecast_per_s": readings.arrivals_per_s,
            **own,
            "work": demand.offered_per_s,
            "backlog": demand.waiting,
            "full": readings.full,
            "room": demand.room,
            "reporting": len(told),
        }

    def _decision(
        self,
        pool: Pool,
        bounds: Bounds,
        word: str,
        because: tuple[str, ...],
        num_workers: int,
        need: Need,
        num_wanted: int,
        seen: Mapping[str, float] | None = None,
        message: str = "",
    ) -> Decision:
        limits = (bounds.min_workers, bounds.max_workers)
        return Decision(
            time.time(), pool, word, because, num_workers, need, num_wanted, limits, seen or {}, self._is_dry_run, message
        )

    def _tell(self, decision: Decision) -> None:
        need, pool = decision.need, decision.pool
        for by, number in (("work", need.for_work), ("wait", need.for_wait), ("room", need.for_room)):
            _NEEDED.labels(pool, by).set(number)
        _DECISIONS.labels(pool, decision.decision).inc()
        if decision.message:
            _FAILURES.labels(pool, decision.because[-1]).inc()
        is_new = self.decisions.put(decision)
        log_event(
            _log, logging.INFO if is_new else logging.DEBUG, "autoscaling",
            pool=pool, decision=decision.decision, because=",".join(decision.because), workers=decision.num_workers,
            needed=need.num_workers, wanted=decision.num_wanted, bounds=f"{decision.bounds[0]}-{decision.bounds[1]}",
            dry_run=decision.is_dry_run or None, error=decision.message,
            **{name: f"{value:.4g}" for name, value in decision.seen.items()},
        )  # fmt: skip
