"""What one attempt holds on a decode worker, and the one path by which it is taken and given back. Knows no tokens' meaning.

A reservation exists before anyone is told of it, covers the whole request (with preemption its beginning, and grows), and ends
with the stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.config.worker import WorkerConfig
from shoal.decode_worker import metrics
from shoal.decode_worker.prefixes import DecodePrefixes, MadeFrom, PromptKeys
from shoal.decode_worker.sink import DecodeSink
from shoal.decode_worker.spec import DecodeSpec
from shoal.engine.holdings import Holding, HoldingQueue, HoldingSize
from shoal.engine.resident import Resident
from shoal.engine.segment import RequestKv
from shoal.engine.state_store import StateStore, num_state_blocks, state_range
from shoal.engine.vision import PromptImages
from shoal.errors import CapacityExceeded, ShoalError, Unavailable, Unsupported
from shoal.kv_transfer import Handle, IncomingTransfer, TransferServer
from shoal.placement.arithmetic import num_deep_states
from shoal.placement.disaggregate import PrefillChoice, SiteReason, choose_prefill_site
from shoal.placement.plan import Entry, TransferPlan, make_plan
from shoal.placement.preemption import num_first_tokens
from shoal.placement.prefix_cache import PrefixCache
from shoal.placement.reservation import ReservationSize, check_fits_ever, decode_reservation, fits_ever, largest_max_tokens
from shoal.placement.tables import RequestTables
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
    keys: PromptKeys | None = None  # of its cached prefix; None where there is no cache
    leaves_prefix: bool = True  # for requests to come

    @property
    def num_cached_tokens(self) -> int:
        """c: prefill tokens that were held here already."""
        return self.holding.num_cached_tokens

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
        cache = PrefixCache(resident.blocks, config.block_size, metrics.EVICTED_BLOCKS.inc) if config.prefix_cache else None
        self.prefixes = DecodePrefixes(cache, resident.pool, fingerprint) if cache is not None else None
        self.holdings = HoldingQueue(
            resident.blocks,
            config.block_size,
            num_layers_to_grow=resident.shape.num_layers if config.preemption else 0,
            max_holders=config.max_running_requests,
            max_queued=config.max_queued,
            cache=cache,
        )

    async def make(self, spec: DecodeSpec, arrived: Callable[[Entry], None]) -> Reservation:
        """Wait for room and reserve all the request will ever need; from then on the transfer may open.

        Raises InvalidRequest when the whole pool would not do, CapacityExceeded when too many wait. `arrived` is called from
        a transfer thread.
        """
        shape, pool = self._resident.shape, self._resident.pool
        size = self._size(spec)
        keys = self.prefixes.keys(spec) if self.prefixes is not None else None
        query = self.prefixes.query(spec.layout, keys) if self.prefixes is not None and keys is not None else None
        resumes = any(child.replay_ids for child in spec.children)
        holding = await self.holdings.reserve(spec.layout, size, spec.turn, query, resumes=resumes)
        try:
            prefill = self._choose_site(spec, holding.num_cached_tokens)
            self._check_eyes(spec, prefill)
            num_prefill = spec.layout.split.num_prefill_tokens
            plan = self._plan(spec, num_prefill if prefill.is_local else holding.num_cached_tokens)
            kept = state_range(plan)
            self.holdings.trim_states(holding, self._num_state_blocks(len(kept)))
            if self.prefixes is not None:
                self.prefixes.take_in(holding)
                self.holdings.release_sources(holding)
            if not prefill.is_local:
                for tables in holding.answers:  # of a transfer, window layers get what a decode token may see
                    self._drop_hidden(tables, num_prefill)
            images = PromptImages.of(self._resident.model.vision, spec.images)
            answers = tuple(RequestKv.of(tables, images) for tables in holding.answers)
            states = StateStore(pool, holding.state_blocks, kept, shape.hidden_size) if kept else None
            sink = DecodeSink(pool, answers[0], states, arrived)
            handle = self._handle(spec, plan, holding.num_cached_tokens)
            incoming = self._transfers.expect(spec.attempt_id, handle, plan, sink) if plan.entries else None
            return Reservation(plan, holding, answers, states, incoming, prefill, keys, not spec.is_background)
        except ShoalError:
            self.holdings.release(holding)
            raise

    def _size(self, spec: DecodeSpec) -> HoldingSize:
        """Room for the request, as if nothing of it were cached: for the whole of it, or with preemption for its beginning.

        Raises InvalidRequest when the whole pool would not do for the whole request.
        """
        shape, visibility, block_size = self._resident.shape, spec.layout.visibility, self._config.block_size

        def size_of(num_tokens: list[int]) -> ReservationSize:
            first, *further = num_tokens
            arguments = shape, self._config.dtype, block_size, visibility, spec.num_prompt_tokens
            return decode_reservation(*arguments, first, further_answers=further)

        size = size_of(spec.num_answer_tokens)
        self._check_fits(spec, size)
        if self._config.preemption:
            replayed = [len(child.replay_ids) for child in spec.children]
            pairs = zip(spec.num_answer_tokens, replayed, strict=True)
            size = size_of([num_first_tokens(num_tokens, num_replayed, block_size) for num_tokens, num_replayed in pairs])
        num_states = 0 if self._choose_site(spec, 0).is_local else num_deep_states(shape, visibility, spec.num_prompt_tokens)
        return HoldingSize(size.num_lower_slots, size.num_upper_slots, self._num_state_blocks(num_states), size.forks)

    def _choose_site(self, spec: DecodeSpec, num_cached_tokens: int) -> PrefillChoice:
        return choose_prefill_site(
            spec.disaggregation,
            spec.layout.split.num_prefill_tokens,
            num_cached_tokens,
            is_colocated=self._config.colocated,
            has_prefill_worker=spec.has_prefill_worker,
            has_images=any(image.stop > num_cached_tokens for image in spec.images),
        )

    def _check_eyes(self, spec: DecodeSpec, prefill: PrefillChoice) -> None:
        """Only prefill workers see images. Raises Unsupported, Unavailable."""
        if prefill.reason is not SiteReason.IMAGES:
            return
        if self._config.colocated:
            raise Unsupported(
                "images are seen by prefill workers, and this server has none; start it with some, or send text alone"
            )
        if not spec.has_prefill_worker:
            raise Unavailable("images are seen by prefill workers, and none is live; retry later")

    def _num_state_blocks(self, num_states: int) -> int:
        return num_state_blocks(num_states, self._resident.shape.hidden_size, self._resident.pool.data[0].numel())

    def publish(self, reservation: Reservation, at: int, num_run: int, answer_ids: Sequence[int]) -> None:
        """Keep what one child has left so far for requests to come (see DecodePrefixes.publish)."""
        if self.prefixes is not None and reservation.keys is not None and reservation.leaves_prefix:
            made_from = MadeFrom(reservation.num_cached_tokens, reservation.prefill.is_local)
            self.prefixes.publish(reservation.keys, reservation.answers[at], num_run, answer_ids, made_from)

    def discard(self, reservation: Reservation) -> None:
        """Nothing of what this request used or left is to be used again."""
        if self.prefixes is not None and reservation.keys is not None:
            self.prefixes.discard(reservation.keys)

    def grow(self, reservation: Reservation, at: int, num_tokens: int) -> bool:
        """Make room for so many tokens of one child's sequence. False, and nothing taken, when there are too few blocks."""
        tables = reservation.holding.answers[at]
        num_upper = tables.layout.num_upper_slots(num_tokens)
        if tables.lower.num_slots >= num_tokens and (not tables.layout.upper_layers or tables.upper.num_slots >= num_upper):
            return True
        try:
            tables.reserve(num_tokens, num_upper)
        except CapacityExceeded:
            return False
        return True

    def drop_hidden(self, reservation: Reservation, at: int, num_run: int) -> None:
        """One child has run so many tokens: give back the blocks that sliding windows hide from the next one. No step may be
        using them."""
        self._drop_hidden(reservation.holding.answers[at], num_run)

    def _drop_hidden(self, tables: RequestTables, position: int) -> None:
        metrics.HIDDEN_BLOCKS.inc(self.holdings.drop_hidden(tables, self._resident.shape.windows, position))

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

    def _handle(self, spec: DecodeSpec, plan: TransferPlan, num_cached_tokens: int) -> Handle:
        return Handle(
            attempt_id=spec.attempt_id,
            fingerprint=self._fingerprint,
            visibility=str(spec.layout.visibility),
            num_prompt_tokens=spec.num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            plan_digest=plan.digest,
        )
