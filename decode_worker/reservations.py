"""What one attempt holds on a decode worker, and the one path by which it is taken and given back. Knows no tokens' meaning.

A reservation exists before anyone is told of it, covers the whole request (there is no preemption), and ends with the stream.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.config.worker import WorkerConfig
from shoal.decode_worker.sink import DecodeSink
from shoal.decode_worker.spec import DecodeSpec
from shoal.engine.holdings import Holding, HoldingQueue, HoldingSize
from shoal.engine.resident import Resident
from shoal.engine.segment import RequestKv
from shoal.engine.state_store import StateStore, num_state_blocks, state_range
from shoal.errors import ShoalError
from shoal.kv_transfer import Handle, IncomingTransfer, TransferServer
from shoal.placement.disaggregate import PrefillChoice, choose_prefill_site
from shoal.placement.plan import Entry, TransferPlan, make_plan
from shoal.placement.reservation import ReservationSize, check_fits_ever, decode_reservation, fits_ever, largest_max_tokens
from shoal.types import Fingerprint


@dataclass(frozen=True, slots=True)
class Reservation:
    """Everything one attempt holds. `incoming` is None when nothing is transferred."""

    plan: TransferPlan
    holding: Holding
    answers: tuple[RequestKv, ...]  # one for each child; the first runs the prompt, the others share its whole blocks
    states: StateStore | None
    incoming: IncomingTransfer | None
    prefill: PrefillChoice  # who runs the prefill tokens

    @property
    def kv(self) -> RequestKv:
        """Where the prompt is."""
        return self.answers[0]


class Reservations:
    """Owner of block tables and incoming transfers. Belongs to the event loop."""

    def __init__(self, resident: Resident, config: WorkerConfig, fingerprint: Fingerprint, transfers: TransferServer) -> None:
        self._resident = resident
        self._config = config
        self._fingerprint = fingerprint
        self._transfers = transfers
        self.holdings = HoldingQueue(
            resident.blocks, config.block_size, max_holders=config.max_running_requests, max_queued=config.max_queued
        )

    async def make(self, spec: DecodeSpec, arrived: Callable[[Entry], None]) -> Reservation:
        """Wait for room and reserve all the request will ever need; from then on the transfer may open.

        Raises InvalidRequest when the whole pool would not do, CapacityExceeded when too many wait. `arrived` is called from
        a transfer thread.
        """
        num_prefill, visibility = spec.layout.split.num_prefill_tokens, spec.layout.visibility
        prefill = choose_prefill_site(
            spec.disaggregation,
            num_prefill,
            is_colocated=self._config.colocated,
            has_prefill_worker=spec.has_prefill_worker,
        )
        plan = self._plan(spec, num_prefill if prefill.is_local else 0)
        first, *further = spec.num_answer_tokens
        size = decode_reservation(
            self._resident.shape,
            self._config.dtype,
            self._config.block_size,
            visibility,
            spec.num_prompt_tokens,
            first,
            further_answers=further,
        )
        self._check_fits(spec, size)
        kept = state_range(plan)
        shape, pool = self._resident.shape, self._resident.pool
        num_blocks = num_state_blocks(len(kept), shape.hidden_size, pool.data[0].numel())
        needed = HoldingSize(size.num_lower_slots, size.num_upper_slots, num_blocks, size.forks)
        holding = await self.holdings.reserve(spec.layout, needed, spec.turn)
        try:
            answers = tuple(RequestKv.of(tables) for tables in holding.answers)
            states = StateStore(pool, holding.state_blocks, kept, shape.hidden_size) if kept else None
            sink = DecodeSink(pool, answers[0], states, arrived)
            incoming = self._transfers.expect(spec.attempt_id, self._handle(spec, plan), plan, sink) if plan.entries else None
            return Reservation(plan, holding, answers, states, incoming, prefill)
        except ShoalError:
            self.holdings.release(holding)
            raise

    def release_states(self, reservation: Reservation) -> None:
        """The deep states have been run or projected: their blocks may serve others."""
        self.holdings.release_states(reservation.holding)

    def release_answer(self, reservation: Reservation, at: int) -> None:
        """One child has ended and others go on: give its own blocks back. No step may be using them."""
        self.holdings.release_answer(reservation.holding, at)

    def drop(self, reservation: Reservation, reason: str) -> None:
        """Give everything back at once; no step may be using it. What is still on the wire goes to quarantined staging."""
        if reservation.incoming is not None:
            reservation.incoming.cancel(reason)
        self.holdings.release(reservation.holding)

    def _check_fits(self, spec: DecodeSpec, size: ReservationSize) -> None:
        """Refuse at once, with advice, what waiting can never make fit."""
        num_blocks = self._resident.blocks.num_blocks
        if not fits_ever(size, num_blocks):
            advice = largest_max_tokens(
                self._resident.shape,
                self._config.block_size,
                spec.layout.visibility,
                spec.num_prompt_tokens,
                num_blocks,
                num_replay_tokens=max(len(child.replay_ids) for child in spec.children),
                num_answers=len(spec.children),
            )
            check_fits_ever(size, num_blocks, max_tokens_that_fit=None if spec.is_score else advice)

    def _plan(self, spec: DecodeSpec, num_not_due: int) -> TransferPlan:
        """What crosses; nothing of the first `num_not_due` tokens."""
        return make_plan(
            self._resident.shape,
            self._config.dtype,
            spec.layout.visibility,
            spec.num_prompt_tokens,
            num_not_due,
            max_entry_bytes=self._config.transfer.max_entry_bytes,
            max_entry_tokens=self._config.transfer.max_entry_tokens,
        )

    def _handle(self, spec: DecodeSpec, plan: TransferPlan) -> Handle:
        return Handle(
            attempt_id=spec.attempt_id,
            fingerprint=self._fingerprint,
            visibility=str(spec.layout.visibility),
            num_prompt_tokens=spec.num_prompt_tokens,
            num_cached_tokens=0,
            plan_digest=plan.digest,
        )
