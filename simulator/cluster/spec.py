"""What is simulated: pools of workers, the network between them, limits and targets. Knows settings; runs nothing."""

from dataclasses import dataclass, field

from shoal.errors import InvalidConfig
from shoal.placement.autoscale import AutoscalePolicy
from shoal.placement.disaggregate import NEVER_LOCAL, DisaggregationRule
from shoal.simulator.hardware import Link
from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.visibility import Visibility, VisibilityKind


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """`count` equal workers. A pool may be given as several of these, with different hardware."""

    machine: Machine
    count: int
    token_budget: int = 2048  # tokens of one step: the compute chunk of prefill
    max_running: int = 256  # requests that hold blocks
    max_queued: int = 4096  # requests that wait for blocks

    def __post_init__(self) -> None:
        for name in ("count", "token_budget", "max_running"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"a pool's {name} must be at least 1, not {getattr(self, name)}")
        if self.max_queued < 0:
            raise InvalidConfig(f"a pool's max_queued must be 0 or more, not {self.max_queued}")


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets per request. Goodput counts the requests that meet both."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05

    def __post_init__(self) -> None:
        if not self.ttft_s > 0 or not self.tpot_s > 0:
            raise InvalidConfig("SLOs must be more than zero")


@dataclass(frozen=True, slots=True)
class AutoscaleSpec:
    """Bounds of the pools that scale (None: it keeps its size), and how fast workers come. Only a pool's first kind is added."""

    prefill: AutoscalePolicy | None = None
    decode: AutoscalePolicy | None = None
    interval_s: float = 5.0
    start_s: float = 30.0  # until a new worker serves
    utilisation: float | None = None  # scale by this threshold instead of by predicted need: to compare

    def __post_init__(self) -> None:
        if not self.interval_s > 0 or self.start_s < 0:
            raise InvalidConfig("autoscaling needs an interval above 0 and a start time of 0 or more")
        if self.utilisation is not None and not 0 < self.utilisation <= 1:
            raise InvalidConfig(f"a threshold of utilisation lies in (0, 1], not {self.utilisation:g}")


@dataclass(frozen=True, slots=True)
class Failure:
    """One worker's death at a given time."""

    at_s: float
    worker: str

    def __post_init__(self) -> None:
        if not self.at_s >= 0:
            raise InvalidConfig(f"worker {self.worker} cannot fail at {self.at_s} s")


@dataclass(frozen=True, slots=True)
class FailureSpec:
    """Planned deaths, and deaths by chance: exponential times with a mean of `mtbf_s` of uptime per worker."""

    planned: tuple[Failure, ...] = ()
    mtbf_s: float | None = None
    restart_s: float = 30.0  # until the worker serves again, empty

    def __post_init__(self) -> None:
        if (self.mtbf_s is not None and not self.mtbf_s > 0) or not self.restart_s > 0:
            raise InvalidConfig("the mean time between failures and the time of a restart must be more than zero")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """No prefill pool means colocated: every worker of `decode` runs prompts and answers."""

    model: ModelSpec
    visibility: Visibility  # resolved
    decode: tuple[PoolSpec, ...]
    prefill: tuple[PoolSpec, ...] = ()
    link: Link | None = None  # one interface of every worker's GPUs
    num_nics: int | None = None  # per worker; None: one per GPU
    fabric_bytes_per_s: float | None = None  # what all flows share; None: not limited
    block_size: int = 16
    prefill_cache: bool = False  # prefill workers keep prefixes: saves compute
    decode_cache: bool = False  # decode workers do: saves the transfer, and all of prefill where nothing is due
    reserve_tokens: int | None = None  # the max_tokens clients ask for; None: exactly what they will get
    max_retries: int = 2  # on other workers, when one is full or has died
    slo: Slo = field(default_factory=Slo)
    disaggregation: DisaggregationRule = NEVER_LOCAL  # which prompts decode workers run themselves
    preemption: bool = False  # decode reserves an answer's first block, and the least senior gives way when a later one is short
    max_wait_s: float | None = None  # requests that would wait longer for their start are refused at once; None: none is
    local_fallback: bool = False  # all of them while no prefill worker is up
    failures: FailureSpec | None = None
    autoscale: AutoscaleSpec | None = None

    def __post_init__(self) -> None:
        if not self.decode:
            raise InvalidConfig("a cluster needs at least one decode (or colocated) worker")
        if self.prefill and self.link is None:
            raise InvalidConfig("prefill and decode workers need a link between them")
        if self.fabric_bytes_per_s is not None and not self.fabric_bytes_per_s > 0:
            raise InvalidConfig("the fabric's bandwidth must be more than zero")
        if self.reserve_tokens is not None and self.reserve_tokens < 1:
            raise InvalidConfig(f"max_tokens of {self.reserve_tokens} makes no sense; use 1 or more")
        for pool in (*self.prefill, *self.decode):
            pool.machine.check_model(self.model)

    @property
    def is_colocated(self) -> bool:
        return not self.prefill

    @property
    def request_s(self) -> float:
        """t_request of the door, which knows one profile only: the first pool's."""
        return (self.prefill or self.decode)[0].machine.profile.request_s

    @property
    def num_gpus(self) -> int:
        return sum(pool.count * pool.machine.tensor_parallel for pool in (*self.prefill, *self.decode))

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all workers; None when some GPU has none."""
        prices = [(pool.count, pool.machine.usd_per_hour) for pool in (*self.prefill, *self.decode)]
        if any(price is None for _, price in prices):
            return None
        return sum(count * (price or 0.0) for count, price in prices)


def held_weight_bytes(model: ModelSpec, visibility: Visibility, *, prefill_only: bool) -> float:
    """Bytes of weights a worker holds (design §5): all of them, or on a prefill worker the layers below K, the embedding and, for
    plain `pop`, the upper layers' K and V projections."""
    if not prefill_only:
        return model.num_parameters * model.weight_bytes
    depth, num_layers = visibility.depth(model.shape.num_layers), model.shape.num_layers
    weights = sum(model.resident_weights(layer) for layer in range(depth)) + model.head_weights
    if visibility.kind is VisibilityKind.POP and not visibility.late:
        weights += (num_layers - depth) * model.kv_projection_weights
    return weights * model.weight_bytes


def block_bytes(model: ModelSpec, machine: Machine, block_size: int) -> float:
    """One block: `block_size` tokens of one layer, replicated heads counted as often as they are held."""
    return block_size * model.kv_token_bytes * machine.replication(model)


def num_kv_blocks(
    model: ModelSpec, visibility: Visibility, machine: Machine, block_size: int, *, prefill_only: bool, min_tokens: int = 1
) -> int:
    """Blocks of a worker's KV pool. Raises InvalidConfig, with the bytes, when weights and `min_tokens` of KV do not fit."""
    weights = held_weight_bytes(model, visibility, prefill_only=prefill_only)
    free = machine.usable_bytes - weights
    blocks = int(free // block_bytes(model, machine, block_size)) if free > 0 else 0
    depth = visibility.depth(model.shape.num_layers) if prefill_only else model.shape.num_layers
    needed = depth * -(-min_tokens // block_size)
    if blocks < needed:
        kind = "prefill worker" if prefill_only else "worker"
        raise InvalidConfig(
            f"{model.name} does not fit a {kind} of {machine.tensor_parallel} × {machine.gpu.name}: {weights / 1e9:.1f} GB of "
            f"weights and {needed * block_bytes(model, machine, block_size) / 1e9:.2f} GB of KV for {min_tokens} tokens, "
            f"{machine.usable_bytes / 1e9:.1f} GB usable; use more GPUs per worker (--tp), larger ones or fewer bytes per weight"
        )
    return blocks
