"""What may be chosen: hardware, tensor parallelism, visibility, batch limits, link. Knows the lists; judges nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shoal.errors import InvalidConfig
from shoal.simulator.cluster.spec import ClusterSpec, PoolSpec, Slo, num_kv_blocks
from shoal.simulator.hardware import Link
from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Options:
    """The search space. Every machine may serve either pool, in any pairing."""

    model: ModelSpec
    machines: tuple[Machine, ...]
    visibilities: tuple[Visibility, ...]  # resolved
    links: tuple[Link, ...]
    batches: tuple[int, ...] = (256,)
    token_budgets: tuple[int, ...] = (2048,)
    slo: Slo = field(default_factory=Slo)
    quantile: float = 0.95
    max_gpus: int = 64
    num_nics: int | None = None
    mixed_hardware: bool = False  # prefill and decode on different machines


@dataclass(frozen=True, slots=True)
class Family:
    """Everything of a candidate but its numbers of workers. `prefill` is None for colocated."""

    model: ModelSpec
    visibility: Visibility
    decode: Machine
    prefill: Machine | None
    link: Link | None
    batch: int
    token_budget: int
    slo: Slo
    num_nics: int | None = None

    def spec(self, num_prefill: int, num_decode: int) -> ClusterSpec:
        """The cluster with so many workers."""
        prefill: tuple[PoolSpec, ...] = ()
        if self.prefill is not None:
            prefill = (PoolSpec(self.prefill, num_prefill, self.token_budget, self.batch),)
        return ClusterSpec(
            model=self.model,
            visibility=self.visibility,
            decode=(PoolSpec(self.decode, num_decode, self.token_budget, self.batch),),
            prefill=prefill,
            link=self.link,
            num_nics=self.num_nics,
            slo=self.slo,
        )

    @property
    def is_colocated(self) -> bool:
        return self.prefill is None

    def in_words(self, cost: float) -> str:
        """A cost with its unit."""
        return f"{cost:.2f} USD per hour" if self.spec(1, 1).usd_per_hour is not None else f"{cost:g} GPUs (no prices)"

    def cost(self, num_prefill: int, num_decode: int) -> tuple[float, int]:
        """(USD per hour, or the number of GPUs where a price is missing; GPUs)."""
        spec = self.spec(max(1, num_prefill), num_decode)
        price = spec.usd_per_hour
        return (spec.num_gpus if price is None else price, spec.num_gpus)


def families(options: Options) -> Iterator[Family]:
    """Colocated clusters first (the baseline), then every split. Machines that cannot hold the model are left out.

    Raises InvalidConfig, with the bytes, when no machine can.
    """
    able, reasons = [], []
    for machine in options.machines:
        try:
            machine.check_model(options.model)
            num_kv_blocks(options.model, Visibility().resolve(options.model.shape.num_layers), machine, 16, prefill_only=False)
            able.append(machine)
        except InvalidConfig as error:
            reasons.append(str(error))
    if not able:
        raise InvalidConfig(f"{options.model.name} fits none of the given workers: {'; '.join(reasons)}")
    full = Visibility().resolve(options.model.shape.num_layers)
    for budget in options.token_budgets:
        for batch in options.batches:
            for visibility in dict.fromkeys([full, *(replace(shown, late=False) for shown in options.visibilities)]):
                for machine in able:
                    yield Family(options.model, visibility, machine, None, None, batch, budget, options.slo)
            for visibility in options.visibilities:
                for prefill, decode in _pairs(able, mixed=options.mixed_hardware):
                    for link in options.links:
                        yield Family(
                            options.model, visibility, decode, prefill, link, batch, budget, options.slo, options.num_nics
                        )


def _pairs(machines: Sequence[Machine], *, mixed: bool) -> Iterator[tuple[Machine, Machine]]:
    for prefill in machines:
        for decode in machines:
            if mixed or prefill == decode:
                yield prefill, decode


def not_yet_runnable(family: Family) -> str:
    """What of this plan a running Shoal cannot do yet, in words; "" when it can do all."""
    missing = []
    machines = [machine for machine in (family.prefill, family.decode) if machine is not None]
    if any(machine.tensor_parallel > 1 for machine in machines):
        missing.append("tensor parallel workers")
    if family.model.weight_bytes not in (2.0, 4.0) or family.model.kv_bytes not in (2.0, 4.0):
        missing.append("quantised weights or KV")
    if family.model.mla is not None or family.model.experts is not None:
        missing.append("this architecture")
    return ", ".join(missing)
