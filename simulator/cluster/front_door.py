"""The simulated router: the live `choose_pair` over what it has sent, retries on full workers, both legs joined.

The order is the live one: choose, reserve at decode, prefill, transfer, decode. What a worker owes is counted as the live router
counts it: token-layers of each leg, decode paid off as tokens come, at most `EXPECTED_TOKENS` of them.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from shoal.errors import CapacityExceeded, InvalidRequest, Unavailable
from shoal.placement.balance import WorkerLoadView, choose_pair, choose_worker
from shoal.placement.cost import request_cost
from shoal.placement.disaggregate import NEVER_LOCAL, DisaggregationRule, choose_prefill_site
from shoal.placement.tally import Tally
from shoal.simulator.cluster.decode_node import DecodeNode
from shoal.simulator.cluster.events import Event
from shoal.simulator.cluster.gate import Gate
from shoal.simulator.cluster.job import Job
from shoal.simulator.cluster.life import Life
from shoal.simulator.cluster.network import Flow, Port
from shoal.simulator.cluster.prefill_node import PrefillNode
from shoal.simulator.workload.requests import SimRequest
from shoal.types import DType, Fingerprint, ModelShape
from shoal.visibility import Visibility

EXPECTED_TOKENS: Final = 256  # what an answer is taken to cost in the balance when max_tokens allows more


@dataclass(slots=True, eq=False)
class FrontDoor:
    """Takes arrivals one by one and follows each job to its end. `log` is called with every job and why it was refused ("")."""

    shape: ModelShape
    visibility: Visibility
    requests: Iterator[SimRequest]
    rng: random.Random
    log: Callable[[Job, str], None]
    reserve_tokens: int | None
    max_retries: int
    disaggregation: DisaggregationRule = NEVER_LOCAL
    local_fallback: bool = False
    gate: Gate | None = None
    request_s: float = 0.0  # what the router, the reservation and the reply take, all of it ahead of the choice
    prefill: dict[str, PrefillNode] = field(default_factory=dict)
    decode: dict[str, DecodeNode] = field(default_factory=dict)
    ports: dict[str, Port] = field(default_factory=dict)
    _open: dict[str, dict[str, Job]] = field(default_factory=dict)  # by worker: what it owes
    tallies: dict[str, Tally] = field(default_factory=lambda: {"prefill": Tally(), "decode": Tally()})  # as workers report them
    num_open: int = 0
    has_all: bool = False  # the last request has arrived
    _num_arrived: int = 0
    _fingerprint: Fingerprint = field(init=False)
    _allowed: frozenset[Visibility] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        layers, heads = shape.num_layers, shape.num_kv_heads
        self._allowed = frozenset((self.visibility.policy,))
        self._fingerprint = Fingerprint(
            "simulated", "", layers, shape.hidden_size, heads, shape.head_dim, DType.BFLOAT16, 0, "", 0, 0
        )

    def first(self) -> list[Event]:
        """The first arrival."""
        return self._next_arrival()

    def _next_arrival(self) -> list[Event]:
        request = next(self.requests, None)
        self.has_all = request is None
        return [] if request is None else [(request.arrival_s, partial(self._arrive, request))]

    @property
    def is_done(self) -> bool:
        """Nothing runs and nothing more comes."""
        return self.has_all and not self.num_open

    def ended(self, job: Job, refusal: str) -> None:
        """The job is over; `refusal` is "" when it was served."""
        self.num_open -= 1
        self.log(job, refusal)

    def _arrive(self, request: SimRequest, now: float) -> list[Event]:
        self._num_arrived += 1
        self.num_open += 1
        max_tokens = max(request.num_output_tokens, self.reserve_tokens or 1)
        job = Job(
            key=str(self._num_arrived),
            index=self._num_arrived,
            split=self.visibility.split(request.num_prompt_tokens),
            num_output_tokens=request.num_output_tokens,
            max_tokens=max_tokens,
            arrival_s=now,
            prefix_hashes=request.prefix_hashes,
            hash_tokens=request.hash_tokens,
        )
        if request.num_prompt_tokens + max_tokens > self.shape.max_context:
            self.ended(job, "longer than the model's context")
            return self._next_arrival()
        if self.request_s:
            return [(now + self.request_s, partial(self._dispatch, job)), *self._next_arrival()]
        return self._dispatch(job, now) + self._next_arrival()

    def retry(self, job: Job, num_generated: int, now: float, *, is_preempted: bool = False) -> list[Event]:
        """A worker of the job has died: the other leg is cancelled, and it goes on elsewhere with what was generated replayed."""
        decode, prefill = job.decode, job.prefill
        self._forget(job)
        events: list[Event] = []
        if prefill is not None and job.flow is not None and job.delivered_s is None:
            events += prefill.cancel(job, now)
        if decode is not None and decode.life.is_up:
            events += decode.cancel(job, now)
        job.begin_again(num_generated, is_preempted=is_preempted)
        if job.num_retries > self.max_retries:
            self.ended(job, "worker failed")
            return events
        return events + self._dispatch(job, now)

    def preempted(self, job: Job, now: float) -> list[Event]:
        """Its blocks were needed: it gives them up and stands in line again, wherever it is then sent."""
        assert job.decode is not None
        return self.retry(job, job.decode.num_generated(job, now), now, is_preempted=True)

    def jobs_of(self, name: str) -> list[Job]:
        """Who has something on a worker, in order of arrival."""
        return list(self._open.get(name, {}).values())

    def _dispatch(self, job: Job, now: float) -> list[Event]:
        """Choose workers and reserve; a full worker is passed over for this request, as often as retries allow."""
        try:
            full = self.gate.crowded(job, now) if self.gate is not None else set()
        except CapacityExceeded:
            self.ended(job, "would wait too long")
            return []
        while True:
            try:
                decode, prefill = self._choose(job, frozenset(full), now)
                job.decode, job.prefill = self.decode[decode], self.prefill[prefill] if prefill else None
                is_reserved = job.decode.reserve(job, now)
            except CapacityExceeded:
                full.add(decode)
                job.num_retries += 1
                if job.num_retries > self.max_retries or len(full) == len(self.decode):
                    self.ended(job, "no room")
                    return []
                continue
            except Unavailable:
                is_up = all(any(node.life.is_ready for node in pool.values()) for pool in (self.decode, self.prefill) if pool)
                self.ended(job, "no room" if is_up else "no worker is up")
                return []
            except InvalidRequest:
                self.ended(job, "larger than a worker's whole KV pool")
                return []
            self._owe(job)
            return self.reserved(job, now) if is_reserved else []

    def reserved_later(self, job: Job, now: float) -> Event:
        """The job's turn has come on its decode worker. Void when its worker dies in the same moment."""
        return (now, partial(self._if_current, self.reserved, job, job.attempt))

    def _if_current(self, then: Callable[[Job, float], list[Event]], job: Job, attempt: int, now: float) -> list[Event]:
        return then(job, now) if job.attempt == attempt and job.decode is not None else []

    def reserved(self, job: Job, now: float) -> list[Event]:
        """Decode has the blocks: call prefill, or begin at once where nothing is to be transferred."""
        job.reserved_s = now
        assert job.decode is not None
        job.num_decode_cached = job.decode.holders.num_cached_tokens(job)
        if job.prefill is not None and job.num_decode_cached >= job.num_prefill_tokens:
            self._open[job.prefill.name].pop(job.key, None)  # nothing is due: prefill is not called
            job.prefill = None
        if job.prefill is None:
            return job.decode.begin(job, now)
        source, sink = job.prefill.port, self.ports[job.decode.name]
        job.flow = Flow(source, sink, partial(self._if_current, self._sent, job, job.attempt))
        try:
            return job.prefill.submit(job, now)
        except (CapacityExceeded, InvalidRequest) as error:
            self._forget(job)
            self.ended(job, "no room" if isinstance(error, CapacityExceeded) else "larger than a worker's whole KV pool")
            return [self.reserved_later(waiter, now) for waiter in job.decode.holders.release(job, now)]

    def _sent(self, job: Job, now: float) -> list[Event]:
        assert job.prefill is not None
        return [(now + job.prefill.handoff_s, partial(self._if_current, self._delivered, job, job.attempt))]

    def _delivered(self, job: Job, now: float) -> list[Event]:
        """The acknowledgement: prefill frees its blocks, decode begins."""
        job.delivered_s = now
        assert job.decode is not None and job.prefill is not None
        self._open[job.prefill.name].pop(job.key, None)
        return job.prefill.release(job, now) + job.decode.begin(job, now)

    def finished(self, job: Job, now: float) -> list[Event]:
        """The last token has come."""
        self.tallies["decode"].answers.add(job.num_output_tokens)
        self._forget(job)
        self.ended(job, "")
        return []

    def _choose(self, job: Job, excluded: frozenset[str], now: float) -> tuple[str, str | None]:
        is_up = any(node.life.is_ready for node in self.prefill.values())
        site = choose_prefill_site(
            self.disaggregation,
            job.num_prefill_tokens,
            is_colocated=not self.prefill,
            has_prefill_worker=is_up or not self.local_fallback,
        )
        job.is_local = site.is_local
        decoders = [self._view(name, self.decode_owed(name, now), node.life) for name, node in self.decode.items()]
        if job.is_local or not self.prefill:
            return choose_worker(decoders, self.visibility, self.rng, pool="decode", excluded=excluded).worker_id, None
        prefillers = [self._view(name, self.prefill_owed(name), node.life) for name, node in self.prefill.items()]
        needs = job.num_prefill_tokens > 0
        pair = choose_pair(decoders, prefillers, self.visibility, self.rng, needs_prefill=needs, excluded=excluded)
        return pair.decode.worker_id, None if pair.prefill is None else pair.prefill.worker_id

    def prefill_owed(self, name: str) -> int:
        """Token-layers that a prefill worker has yet to hand over."""
        return sum(job.prefill_debt for job in self._open.get(name, {}).values())

    def decode_owed(self, name: str, now: float) -> int:
        """Token-layers that a decode worker has yet to run."""
        node, layers = self.decode[name], self.shape.num_layers
        return sum(max(0, job.decode_debt - node.num_generated(job, now) * layers) for job in self._open.get(name, {}).values())

    def _owe(self, job: Job) -> None:
        cost = request_cost(self.shape, self.visibility, job.num_prompt_tokens, min(job.max_tokens, EXPECTED_TOKENS))
        assert job.decode is not None
        job.prefill_debt, job.decode_debt = cost.prefill.token_layers, cost.decode.token_layers
        is_here = job.prefill is None
        self.tallies["decode"].num_arrived += 1
        self.tallies["decode"].prompts.add(job.num_prefill_tokens if is_here else 0)
        if job.prefill is None:
            job.decode_debt += job.prefill_debt  # colocated: one worker owes both
        else:
            self.tallies["prefill"].num_arrived += 1
            self.tallies["prefill"].prompts.add(job.num_prefill_tokens)
            self._open.setdefault(job.prefill.name, {})[job.key] = job
        self._open.setdefault(job.decode.name, {})[job.key] = job

    def _forget(self, job: Job) -> None:
        for node in (job.decode, job.prefill):
            if node is not None:
                self._open.get(node.name, {}).pop(job.key, None)

    def _view(self, name: str, owed: int, life: Life) -> WorkerLoadView:
        return WorkerLoadView(name, self._fingerprint, self._allowed, 1 << 30, owed, life.is_ready)
