"""What one handoff costs: bytes, serial and exposed seconds, load on the link. Knows formulas 3 and 4; knows no queue.

Sources: bytes are placement/arithmetic.py's (design §2), times the replication of KV heads under tensor parallelism. Overlap is
formula 4 of docs/planning.md: done_l = max(done_{l−1}, R_l) + latency + bytes_l/bandwidth.
"""

from dataclasses import dataclass

from shoal.errors import InvalidConfig
from shoal.placement.arithmetic import num_deep_states, num_shipped_tokens, shipped_kv_layers
from shoal.simulator.hardware import Link
from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.step_cost import StepCost, chunks
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Wire:
    """The path between two workers: `num_nics` interfaces side by side."""

    link: Link
    num_nics: int
    efficiency: float
    handoff_s: float  # t_handoff: constant per request
    message_s: float = 0.0  # beside the link's latency, per layer and chunk

    def __post_init__(self) -> None:
        if self.num_nics < 1 or not 0 < self.efficiency <= 1 or self.handoff_s < 0 or self.message_s < 0:
            raise InvalidConfig(f"a wire needs 1 or more interfaces, a share in (0, 1] and no negative times: {self}")

    @classmethod
    def of(cls, link: Link, machine: Machine, num_nics: int | None = None) -> "Wire":
        """One interface per GPU of the worker unless said otherwise."""
        profile = machine.profile
        return cls(link, num_nics or machine.tensor_parallel, profile.link, profile.handoff_s, profile.transfer_step_s)

    @property
    def bytes_per_s(self) -> float:
        return self.link.bytes_per_s * self.num_nics * self.efficiency

    @property
    def latency_s(self) -> float:
        """Per message, that is per layer and chunk."""
        return self.link.latency_s + self.message_s


@dataclass(frozen=True, slots=True)
class HandoffBytes:
    """Payload of one handoff, by kind."""

    kv_bytes: float
    deep_state_bytes: float

    @property
    def total(self) -> float:
        return self.kv_bytes + self.deep_state_bytes


@dataclass(frozen=True, slots=True)
class HandoffCost:
    """One handoff on an idle link."""

    num_bytes: float
    prefill_s: float  # the prefill leg that produces the bytes
    serial_s: float  # everything sent after prefill
    exposed_s: float  # what remains after prefill when layers are sent as they finish


def handoff_bytes(
    model: ModelSpec, visibility: Visibility, num_prompt_tokens: int, *, num_cached: int = 0, replication: float = 1.0
) -> HandoffBytes:
    """Formula 3: placement's counts × kb, KV replicated × max(1, TP/kv_heads); deep states cross once."""
    shape = model.shape
    num_due = max(0, visibility.split(num_prompt_tokens).num_prefill_tokens - num_cached)
    layer_tokens = sum(num_shipped_tokens(shape, layer, num_due) for layer in shipped_kv_layers(shape, visibility))
    states = num_deep_states(shape, visibility, num_prompt_tokens, num_cached)
    return HandoffBytes(layer_tokens * model.kv_token_bytes * replication, states * shape.hidden_size * model.hidden_bytes)


@dataclass(frozen=True, slots=True)
class Send:
    """One message of a transfer that is alone on its link. Seconds from the start of prefill."""

    layer: int | None  # None: deep states
    ready_s: float
    done_s: float
    num_bytes: float


def handoff_cost(
    cost: StepCost, wire: Wire, num_prompt_tokens: int, *, num_cached: int = 0, chunk_tokens: int | None = None
) -> HandoffCost:
    """Serial and exposed seconds of one handoff under formula 4, nothing else on the link.

    Exposed counts from the end of the prefill leg, so TTFT = prefill + exposed + the first step.
    """
    num_prefill = cost.visibility.split(num_prompt_tokens).num_prefill_tokens
    if num_prefill <= num_cached:
        return HandoffCost(0.0, 0.0, 0.0, 0.0)
    replication = cost.machine.replication(cost.model)
    total = handoff_bytes(cost.model, cost.visibility, num_prompt_tokens, num_cached=num_cached, replication=replication).total
    sends = timeline(cost, wire, num_prompt_tokens, num_cached=num_cached, chunk_tokens=chunk_tokens)
    prefill_s = cost.prefill_s(num_prefill, num_cached=num_cached, chunk_tokens=chunk_tokens)
    serial_s = len(sends) * wire.latency_s + total / wire.bytes_per_s + wire.handoff_s
    done_s = sends[-1].done_s if sends else 0.0
    return HandoffCost(total, prefill_s, serial_s, max(0.0, done_s - prefill_s) + wire.handoff_s)


def timeline(
    cost: StepCost, wire: Wire, num_prompt_tokens: int, *, num_cached: int = 0, chunk_tokens: int | None = None
) -> list[Send]:
    """Every message in order, by formula 4: done_l = max(done_{l−1}, R_l) + latency + bytes_l/bandwidth.

    R_l are spread evenly over a chunk's time; plain `pop`'s upper K and V and late `pop`'s hidden states are ready only after
    layer K−1.
    """
    model, visibility, shape = cost.model, cost.visibility, cost.model.shape
    split = visibility.split(num_prompt_tokens)
    num_due = max(0, split.num_prefill_tokens - num_cached)
    token_bytes = model.kv_token_bytes * cost.machine.replication(model)
    first_sent = [split.num_prefill_tokens - num_shipped_tokens(shape, layer, num_due) for layer in range(shape.num_layers)]
    num_states = num_deep_states(shape, visibility, num_prompt_tokens, num_cached)
    state_stop = split.num_anchor_tokens if not visibility.late else split.num_prefill_tokens

    now = done = 0.0
    sends: list[Send] = []
    for start, stop in chunks(num_cached, split.num_prefill_tokens, chunk_tokens):
        chunk = cost.chunk(start, stop)
        ready = _layer_ready(cost, chunk.layers_s, chunk.projections_s, now + chunk.overhead_s)
        now += chunk.total_s
        pieces: list[tuple[int | None, float, float]] = []
        for layer in shipped_kv_layers(shape, visibility):
            pieces.append((layer, ready[layer], max(0, stop - max(start, first_sent[layer])) * token_bytes))
        states = max(0, min(stop, state_stop) - max(start, state_stop - num_states))
        pieces.append((None, ready[cost.depth - 1], states * shape.hidden_size * model.hidden_bytes))
        for layer_or_states, at, num_bytes in pieces:
            if num_bytes:
                done = max(done, at) + wire.latency_s + num_bytes / wire.bytes_per_s
                sends.append(Send(layer_or_states, at, done, num_bytes))
    return sends


def _layer_ready(cost: StepCost, layers_s: float, projections_s: float, begin_s: float) -> list[float]:
    """R_l of every layer in one chunk; layers weigh by their share of the chunk's time, taken as even."""
    depth, num_upper = cost.depth, cost.num_upper
    lower = [begin_s + layers_s * (layer + 1) / depth for layer in range(depth)]
    upper = [begin_s + layers_s + projections_s * (index + 1) / max(1, num_upper) for index in range(num_upper)]
    return lower + upper
