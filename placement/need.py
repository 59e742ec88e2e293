"""What a pool will need, predicted from what its workers report: readings and a model of their pace in, a PoolDemand out. Pure.

Work is counted in workers: seconds of work that arrive per second. A prompt costs what the model says of its length; a generated
token costs step(B)/B, B being the largest batch that keeps TPOT. Beside work there is the wait (prefill: as many workers as keep
the TTFT of the asked quantile, `queueing.py`) and room (decode: rows and KV blocks, those held and waited for now and, by
Little's law, those that the forecast arrivals will hold). What is held counts in workers' worth, so that workers which start do
not seem full.
"""

from dataclasses import dataclass

from shoal.errors import InvalidConfig
from shoal.placement.autoscale import PoolDemand
from shoal.placement.queueing import workers_for_wait
from shoal.placement.service import ServiceModel
from shoal.placement.tally import NO_SIZES, Sizes


@dataclass(frozen=True, slots=True)
class Targets:
    """What is promised. Raises InvalidConfig."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05
    quantile: float = 0.95  # of the requests that TTFT is to hold for

    def __post_init__(self) -> None:
        if not self.ttft_s > 0 or not self.tpot_s > 0:
            raise InvalidConfig(f"ttft_s and tpot_s must be more than 0, not {self.ttft_s:g} and {self.tpot_s:g}")
        if not 0 < self.quantile < 1:
            raise InvalidConfig(f"quantile must lie between 0 and 1, not {self.quantile:g}")


@dataclass(frozen=True, slots=True)
class PrefillReadings:
    """Of all prefill workers that report."""

    arrivals_per_s: float = 0.0  # forecast for when a worker that is started now serves
    prompts: Sizes = NO_SIZES  # lately: tokens to run
    waiting_tokens: float = 0.0  # accepted and not run yet
    full: float = 0.0  # KV blocks held, in workers


@dataclass(frozen=True, slots=True)
class DecodeReadings:
    """Of all decode (or colocated) workers that report."""

    arrivals_per_s: float = 0.0
    answers: Sizes = NO_SIZES  # lately: tokens sampled
    prompts: Sizes = NO_SIZES  # lately: prefill tokens run here
    num_waiting: float = 0.0  # requests that wait for blocks
    num_rows: float = 0.0  # requests that run
    max_rows: int = 1  # that one worker may run
    full: float = 0.0  # KV blocks, or places for requests, held, in workers
    blocks_per_request: float = 0.0
    blocks_per_worker: float = 0.0
    mean_hold_s: float = 0.0
    pairs_per_row: float = 0.0  # (token, layer) pairs of KV that a row reads


def prefill_demand(readings: PrefillReadings, model: ServiceModel, targets: Targets) -> PoolDemand:
    """In workers. The wait leaves of TTFT what a long prompt and a decode step take."""
    services = [(share, model.prefill_s(size)) for share, size in readings.prompts.parts()]
    mean_s = sum(share * seconds for share, seconds in services)
    mean_tokens = readings.prompts.mean
    waiting = readings.waiting_tokens / mean_tokens * mean_s if mean_tokens else 0.0
    left_s = targets.ttft_s - model.prefill_s(readings.prompts.quantile(targets.quantile)) - model.step_s(1)
    for_wait = workers_for_wait(readings.arrivals_per_s, services, targets.quantile, left_s) if left_s > 0 else 1
    return PoolDemand(readings.arrivals_per_s * mean_s, waiting, 1.0, readings.full, for_wait)


def decode_demand(readings: DecodeReadings, model: ServiceModel, targets: Targets) -> PoolDemand:
    """In workers."""
    batch = largest_batch(model, targets.tpot_s, readings.max_rows, readings.pairs_per_row)
    token_s = model.step_s(batch, readings.pairs_per_row) / batch
    answer_s = readings.answers.mean * token_s
    prompts_s = (
        0.0 if model.steps_hold_prompts else sum(share * model.prefill_s(size) for share, size in readings.prompts.parts())
    )
    share = readings.blocks_per_request / readings.blocks_per_worker if readings.blocks_per_worker else 0.0
    rows = (readings.num_rows + readings.num_waiting) / batch
    now = readings.full + readings.num_waiting * max(share, 1 / readings.max_rows)
    soon = readings.arrivals_per_s * readings.mean_hold_s * share
    return PoolDemand(
        readings.arrivals_per_s * (answer_s + prompts_s),
        readings.num_waiting * (answer_s + prompts_s),
        1.0,
        max(rows, now, soon),
    )


def largest_batch(model: ServiceModel, tpot_s: float, max_rows: int, pairs_per_row: float) -> int:
    """The most rows whose step keeps TPOT: 1 where none does, `max_rows` where nothing is known."""
    low, high = 1, max(1, max_rows) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if model.step_s(middle, pairs_per_row) <= tpot_s else (low, middle)
    return low
