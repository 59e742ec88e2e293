"""What the workers' reports tell of a pool: arrivals, sizes, pace, room. Knows counts that grow and their differences."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from shoal.config.worker import Pool
from shoal.pb.internal.v1 import worker_pb2, worker_pb2_grpc
from shoal.placement.history import PoolHistory
from shoal.placement.need import DecodeReadings, PrefillReadings
from shoal.placement.service import MeasuredService
from shoal.placement.tally import SizeCounts, Tally
from shoal.rpc import ClusterLink

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Told:
    """One worker's report."""

    worker_id: str
    epoch: int
    report: worker_pb2.WorkReport


async def ask(workers: Iterable[worker_pb2.WorkerDescription], link: ClusterLink, timeout_s: float) -> list[Told]:
    """The reports of those that answer in time."""

    async def one(worker: worker_pb2.WorkerDescription) -> Told | None:
        is_prefill = Pool(worker.pool) is Pool.PREFILL
        async with link.open_channel(worker.address) as channel:
            stub: Any = worker_pb2_grpc.PrefillWorkerStub(channel) if is_prefill else worker_pb2_grpc.DecodeWorkerStub(channel)
            try:
                report = await stub.GetWork(worker_pb2.GetWorkRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                _log.info("%s does not report: %s", worker.worker_id, error.code().name)
                return None
        return Told(worker.worker_id, worker.epoch, report)

    return [told for told in await asyncio.gather(*map(one, workers)) if told is not None]


@dataclass(slots=True)
class PoolWatch:
    """Of one pool. `measured` learns the pace; both pools share it."""

    pool: Pool
    measured: MeasuredService
    history: PoolHistory = field(default_factory=PoolHistory)
    _before: dict[str, tuple[int, Tally]] | None = None  # of each worker: its epoch, and what it had done

    def saw(self, told: Sequence[Told], seconds: float) -> None:
        """Reports, so many seconds after the last ones. What happened before the first ones tells sizes and pace, but no rate."""
        before, all_done = self._before or {}, Tally()
        latest = dict(before)
        for each in told:
            now = _tally(each.report)
            epoch, then = before.get(each.worker_id, (each.epoch, Tally()))
            done = now.since(then) if epoch == each.epoch else now
            latest[each.worker_id] = (each.epoch, now)
            all_done = all_done.plus(done)
            if self.pool is Pool.PREFILL:
                self.measured.prefilled(done.step_tokens, done.step_s)
            else:
                self.measured.decoded(done.num_steps, done.step_reqs, done.step_s)
        self.history.saw(all_done, seconds, tells_rate=self._before is not None)
        self._before = latest

    def prefill(self, told: Sequence[Told], ahead_s: float, depth: int) -> PrefillReadings:
        """`depth`: layers that a prefill token runs through."""
        loads = [each.report.load for each in told]
        return PrefillReadings(
            self.history.forecast.per_s(ahead_s),
            self.history.prompts,
            sum(load.outstanding_token_layers for load in loads) / depth,
            sum(load.num_used_blocks / load.num_total_blocks for load in loads if load.num_total_blocks),
        )

    def decode(self, told: Sequence[Told], ahead_s: float, block_size: int) -> DecodeReadings:
        """A block is `block_size` tokens of one layer."""
        loads = [each.report.load for each in told if each.report.load.max_reservations]
        num_holders = sum(load.num_reservations for load in loads)
        blocks_per_request = sum(load.num_used_blocks for load in loads) / num_holders if num_holders else 0.0
        return DecodeReadings(
            arrivals_per_s=self.history.forecast.per_s(ahead_s),
            answers=self.history.answers,
            prompts=self.history.prompts,
            num_waiting=sum(load.num_waiting_reqs for load in loads),
            num_rows=sum(load.num_running_reqs for load in loads),
            max_rows=min((load.max_reservations for load in loads), default=1),
            full=sum(
                max(load.num_used_blocks / max(1, load.num_total_blocks), load.num_reservations / load.max_reservations)
                for load in loads
            ),
            blocks_per_request=blocks_per_request,
            blocks_per_worker=_mean(load.num_total_blocks for load in loads),
            mean_hold_s=_mean(load.mean_hold_s for load in loads),
            pairs_per_row=blocks_per_request * block_size,
        )


def _tally(report: worker_pb2.WorkReport) -> Tally:
    return Tally(
        report.num_arrived_reqs,
        SizeCounts(list(report.prompts_by_size), report.prompt_tokens),
        SizeCounts(list(report.answers_by_size), report.answer_tokens),
        report.num_steps,
        report.step_s,
        report.step_reqs,
        report.step_tokens,
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0
