"""Whether there is room for more workers: memory of this machine for a Ray of our own, Ray's free places for a joined one."""

from typing import Protocol

from shoal.config.memory import usable_memory_bytes
from shoal.config.serve import ServeConfig
from shoal.config.worker import Pool
from shoal.controller.names import ActorResources
from shoal.errors import CapacityExceeded, InvalidConfig

_MAX_WORKERS = 1024  # of one pool; beyond, a slip of the finger is likelier than a wish


class Places(Protocol):
    """A Ray that knows how many more actors it could place."""

    def num_places(self, resources: ActorResources, pool: Pool | None) -> int: ...


def worker_resources(config: ServeConfig) -> ActorResources:
    """What Ray reserves for each worker. CPUs of our own machine are not counted: it may run more threads than it has."""
    return ActorResources(
        num_cpus=config.threads_per_worker if config.ray_address else 0,
        num_gpus=1 if config.transfer_backend == "nccl" else 0,
        use_pool_label=config.pool_labels,
    )


def check_size(config: ServeConfig, pool: Pool, size: int) -> None:
    """Raise InvalidConfig for a size that a pool can never have."""
    if config.num_workers(pool) == 0 and size:
        raise InvalidConfig(f"this cluster has no {pool} pool; it cannot be given {size} workers")
    if config.num_workers(pool) and size < 1:
        raise InvalidConfig(f"the {pool} pool needs at least 1 worker: without it no request can be served")
    if size > _MAX_WORKERS:
        raise InvalidConfig(f"{size} {pool} workers are more than a pool may have ({_MAX_WORKERS})")
    bounds = config.autoscale_bounds(pool)
    if bounds is not None and not config.autoscale_dry_run and not bounds.min_workers <= size <= bounds.max_workers:
        raise InvalidConfig(f"the {pool} pool scales itself between {bounds} workers; {size} would not last: change those bounds")
    config.metrics_address(f"{pool}-{max(0, size - 1)}")


def check_memory(config: ServeConfig, num_workers: int) -> None:
    """Pools on this machine's own memory, which is taken whole when workers start: too much would have them killed."""
    if config.ray_address or config.transfer_backend == "nccl":
        return
    usable_bytes, whose = usable_memory_bytes()
    if num_workers * config.kv_memory > usable_bytes:
        raise InvalidConfig(
            f"the KV pools of {num_workers} workers may take {num_workers * config.kv_memory / 1e9:.1f} GB, {whose} has "
            f"{usable_bytes / 1e9:.1f} GB; lower --kv-memory or the number of workers"
        )


def check_room(config: ServeConfig, cluster: Places, more: dict[Pool, int], num_now: int) -> None:
    """Raise CapacityExceeded when so many more workers of each pool have no place beside the present ones."""
    num_more = sum(more.values())
    if num_more <= 0:
        return
    try:
        check_memory(config, num_now + num_more)
    except InvalidConfig as error:
        raise CapacityExceeded(str(error)) from None
    resources = worker_resources(config)
    if config.pool_labels:
        for pool, wanted in more.items():
            if wanted > (free := cluster.num_places(resources, pool)):
                raise CapacityExceeded(_words(wanted, f" {pool}", resources, free, f" on nodes labelled pool={pool}"))
    elif num_more > (free := cluster.num_places(resources, None)):
        raise CapacityExceeded(_words(num_more, "", resources, free, ""))


def _words(wanted: int, pool: str, resources: ActorResources, free: int, where: str) -> str:
    each = _count(resources.num_cpus, "CPU") + (f" and {_count(resources.num_gpus, 'GPU')}" if resources.num_gpus else "")
    return (
        f"{wanted} more{pool} workers of {each} each do not fit: Ray has free places for {free}{where}; add nodes, ask for "
        f"fewer, or let them wait for nodes with --allow-pending"
    )


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}" + ("" if number == 1 else "s")
