"""What `shoal serve` is told: one frozen object, from flags or a YAML file with the same names. Knows no model, no process."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from shoal.config.autoscale import AutoscaleConfig, Bounds
from shoal.config.cpus import parse_cpus
from shoal.config.disaggregation import LOCAL_CACHED_SHARE, LOCAL_PREFILL_TOKENS, DisaggregationRule
from shoal.config.images import ImageLimits
from shoal.config.logs import FORMATS, LEVELS
from shoal.config.reading import check_choice, convert, named, nearest, read_address, read_section
from shoal.config.router import HTTP_MAX_BODY_MB, body_bytes
from shoal.config.shadow import ShadowConfig
from shoal.config.tls import ClusterConfig, TlsConfig
from shoal.config.transfer import AUTO, BACKENDS, TransferConfig, choose_backend
from shoal.config.worker import MAX_THREADS, MAX_TOKEN_BUDGET, NODE, Pool, WorkerConfig
from shoal.errors import InvalidConfig, InvalidRequest
from shoal.types import DType
from shoal.visibility import Visibility

_SHADOW = ShadowConfig()
_IMAGES = ImageLimits()

_SET_ABOVE: Final = {"backend": "transfer_backend", "host": "worker_host"}  # of `transfer`, and where they are set


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Every knob of an all-in-one cluster. Raises InvalidConfig, naming the knob, when a value cannot work.

    A field is a YAML key (`prefill_workers`) and a flag (`--prefill-workers`) at once.
    """

    model: str = "smollm2-135m"
    adapter: str = ""  # folder of a LoRA adapter for it; "": none
    adapter_any_visibility: bool = False  # serve it under other visibilities than the one it was tuned for
    dtype: str = DType.FLOAT32
    visibilities: tuple[str, ...] = ("full",)  # the allow-list; the first is the default
    max_boundary_tokens: int = 64
    listen: str = "127.0.0.1:50051"
    http_listen: str = ""  # host:port of OpenAI's API; "": none
    http_max_body_mb: float = HTTP_MAX_BODY_MB
    routers: int = 1  # each on a port of its own: those of `listen` and `http_listen` and the ones that follow
    controller_listen: str = ""  # host:port where routers and `shoal scale` find the controller; "": a free port of worker_host
    allow_wildcard: bool = False  # permits `listen` and `http_listen` on every interface
    prefill_workers: int = 1
    decode_workers: int = 1
    colocated: bool = False  # decode workers prefill every prompt themselves; prefill_workers is 0
    local_prefill_tokens: int = LOCAL_PREFILL_TOKENS  # shorter prompts are prefilled on decode; 0: none
    local_cached_share: float = LOCAL_CACHED_SHARE  # so are those of which decode holds this share; 1: none
    prefill_fallback: bool = False  # and all others while no prefill worker is live
    shadow_rate: float = _SHADOW.rate  # share of finished shallow requests that are replayed at full depth; config/shadow.py
    shadow_min_agreement: float = _SHADOW.min_agreement
    shadow_max_kl: float = _SHADOW.max_kl
    shadow_window: int = _SHADOW.window
    shadow_min_samples: int = _SHADOW.min_samples
    shadow_hysteresis: float = _SHADOW.hysteresis
    shadow_cool_down_s: float = _SHADOW.cool_down_s
    threads_per_worker: int = 1
    prefill_cpus: str = ""  # CPUs that each worker of a pool is kept to, as in 0-3; "": any
    decode_cpus: str = ""
    kv_memory: int = 512 << 20  # bytes per worker
    block_size: int = 16  # tokens
    token_budget: int = 512  # tokens per step
    prefix_cache: bool = True  # keep the KV of prefixes for requests to come
    preemption: bool = False  # decode reserves room as tokens come; who came last gives way when there is none
    max_requests: int = 64  # running together on one worker
    max_wait_s: float = 60.0  # a request that would wait longer for its start is refused at once; 0: none is
    max_context_tokens: int = 0  # prompt and answer together; 0: the model's own limit
    max_images: int = _IMAGES.max_images  # of one request; config/images.py
    max_image_mb: float = _IMAGES.max_image_mb
    max_images_mb: float = _IMAGES.max_images_mb
    max_image_megapixels: float = _IMAGES.max_image_megapixels
    transfer_backend: str = AUTO
    worker_host: str = "127.0.0.1"  # the interface workers and the controller bind to; "node": each worker its Ray node's address
    worker_port: int = 0  # gRPC of every worker, where each has a node to itself; 0: any free port
    worker_metrics_port: int = 0  # likewise, its /metrics; 0: numbered on from metrics_port
    ray_address: str = ""  # "" starts a local Ray
    ray_namespace: str = "shoal"  # one per Shoal cluster that shares a Ray
    pool_labels: bool = False  # place actors by the node label pool=prefill / pool=decode
    keep_workers: bool = False  # leave detached actors running on SIGTERM, to be adopted again
    metrics_port: int = 0  # 0: no metrics
    start_timeout_s: float = 300.0
    hang_timeout_s: float = 10.0  # who is not SERVING, or does not move, for so long is killed and replaced
    grace_s: float = 10.0  # how long running requests may finish after SIGTERM
    log_level: str = "info"
    log_format: str = "text"
    tls_cert: str = ""  # PEM files of both doors
    tls_key: str = ""
    tls_ca: str = ""
    tls_require_client_cert: bool = False
    tokens_file: str = ""  # who may call; "": everybody
    cluster_secret_file: str = ""  # "": `shoal serve` makes one
    cluster_tls_cert: str = ""  # PEM files of every gRPC call between router, controller and workers
    cluster_tls_key: str = ""
    cluster_tls_ca: str = ""
    autoscale_prefill: str = ""  # MIN-MAX workers that the pool scales between; "": it keeps its size
    autoscale_decode: str = ""
    autoscale_nodes: str = "fixed"  # who brings machines: nobody, Ray's own autoscaler, or we by way of a RayCluster
    autoscale_dry_run: bool = False  # decide and tell, change nothing
    chaos: bool = False  # permits SHOAL_FAULTS in workers (tests only)
    transfer: TransferConfig = field(default_factory=TransferConfig)  # YAML only: a mapping; backend and host come from above
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)  # YAML only: a mapping

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, tuple(DType))
        check_choice("transfer_backend", self.transfer_backend, (AUTO, *BACKENDS))
        check_choice("log_level", self.log_level, LEVELS)
        check_choice("log_format", self.log_format, FORMATS)
        if self.colocated and self.prefill_workers:
            raise InvalidConfig(f"colocated has no prefill pool; leave prefill_workers out (it is {self.prefill_workers})")
        pools = ("decode_workers",) if self.colocated else ("prefill_workers", "decode_workers")
        for name in ("routers", *pools, "threads_per_worker", "block_size", "token_budget", "max_requests"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, ceiling in (("threads_per_worker", MAX_THREADS), ("token_budget", MAX_TOKEN_BUDGET)):
            if getattr(self, name) > ceiling:
                raise InvalidConfig(f"{name} must be at most {ceiling}, not {getattr(self, name)}")
        with named("local_prefill_tokens, local_cached_share"):
            DisaggregationRule(self.local_prefill_tokens, self.local_cached_share)
        for name in ("start_timeout_s", "hang_timeout_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidConfig(f"{name} must be a number of seconds greater than 0, not {getattr(self, name)}")
        for name in ("grace_s", "max_wait_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidConfig(f"{name} must be a number of seconds, 0 or more, not {getattr(self, name)}")
        if self.max_boundary_tokens < 1:
            raise InvalidConfig("max_boundary_tokens must be at least 1")
        if self.kv_memory < 1:
            raise InvalidConfig("kv_memory must be greater than 0, as in 512MiB")
        if not self.visibilities:
            raise InvalidConfig("visibilities must name at least one visibility, as in full,speed:22,pop:20")
        body_bytes(self.http_max_body_mb)
        self._check_metrics_ports()
        self._check_worker_ports()
        if self.pool_labels and not self.ray_address:
            raise InvalidConfig("pool_labels needs ray_address: the node of a local Ray has no labels")
        if self.keep_workers and not self.ray_address:
            raise InvalidConfig("keep_workers needs ray_address: workers of a local Ray end with it")
        for pool in Pool:
            self.cpus(pool)
        self._check_autoscaling()
        self.listen_address, self.http_address, self.tls, self.cluster, self.shadow, self.images  # noqa: B018  (raise when they cannot be read)
        if self.controller_listen:
            read_address("controller_listen", self.controller_listen)
        for name, address in (("listen", self.listen_address), ("http_listen", self.http_address)):
            if address is not None and address[1] and address[1] + self.routers - 1 > 65535:
                raise InvalidConfig(f"{name} leaves no ports for {self.routers} routers: 65535 is the last")
        seen: set[Visibility] = set()
        for text in self.visibilities:
            try:
                visibility = Visibility.parse(text)
            except InvalidRequest as error:
                raise InvalidConfig(f"visibilities: {error}") from None
            if visibility in seen:
                raise InvalidConfig(f"visibilities: '{visibility}' is named twice")
            seen.add(visibility)
            if visibility.boundary_tokens is not None:
                raise InvalidConfig(f"visibilities: {text!r} must not fix a boundary; requests do, up to max_boundary_tokens")

    def _check_worker_ports(self) -> None:
        for name in ("worker_port", "worker_metrics_port"):
            port = getattr(self, name)
            if not 0 <= port <= 65535:
                raise InvalidConfig(f"{name} must lie in 0…65535, not {port}")
            if port and self.worker_host != NODE:
                raise InvalidConfig(
                    f"{name} is one port for all workers: each needs an address of its own; set worker_host to node"
                )
        if self.worker_port and self.worker_port == self.worker_metrics_port:
            raise InvalidConfig(f"worker_port and worker_metrics_port are both {self.worker_port}; move one")

    def _check_metrics_ports(self) -> None:
        last = self.metrics_port + self.routers + self.prefill_workers + self.decode_workers
        if not (0 <= self.metrics_port <= 65535):
            raise InvalidConfig(f"metrics_port must lie in 0…65535 (0: no metrics), not {self.metrics_port}")
        if self.metrics_port and last > 65535:
            raise InvalidConfig(f"metrics_port {self.metrics_port} and one port for each process reach {last}; 65535 is the last")
        first, routers = self.listen_address[1], self.routers
        if self.metrics_port and first and first <= last and self.metrics_port < first + routers:
            raise InvalidConfig(f"listen {self.listen} lies among the metrics ports {self.metrics_port}…{last}; move one")

    @property
    def shadow(self) -> ShadowConfig:
        """Replays at full depth, and the band of quality."""
        return ShadowConfig.read(dataclasses.asdict(self))

    @property
    def images(self) -> ImageLimits:
        """How much the images of a request may take."""
        return ImageLimits.read(dataclasses.asdict(self))

    def _check_autoscaling(self) -> None:
        bounds = {pool: self.autoscale_bounds(pool) for pool in Pool}
        self.autoscale.check_nodes(self.autoscale_nodes)
        scales = any(bounds.values())
        if not scales and (self.autoscale_dry_run or self.autoscale_nodes != "fixed"):
            name = "autoscale_dry_run" if self.autoscale_dry_run else f"autoscale_nodes {self.autoscale_nodes}"
            raise InvalidConfig(f"{name} has no effect: no pool scales; give autoscale_prefill or autoscale_decode, as in 1-4")
        if self.colocated and bounds[Pool.PREFILL]:
            raise InvalidConfig("colocated and autoscale_prefill contradict each other: there is no prefill pool; leave one out")
        for pool, bound in bounds.items():
            if bound is not None and self.num_workers(pool) > bound.max_workers:
                raise InvalidConfig(f"{pool}_workers {self.num_workers(pool)} lies above autoscale_{pool} {bound}; change one")
        if self.autoscale_nodes != "fixed" and not (self.ray_address and self.pool_labels):
            words = "needs ray_address and pool_labels: it brings nodes to that Ray"
            raise InvalidConfig(f"autoscale_nodes {self.autoscale_nodes} {words}")

    @property
    def tls(self) -> TlsConfig:
        """Of both doors."""
        with named("tls_cert, tls_key, tls_ca, tls_require_client_cert"):
            return TlsConfig(self.tls_cert, self.tls_key, self.tls_ca, self.tls_require_client_cert)

    @property
    def cluster(self) -> ClusterConfig:
        """Of the calls between router, controller and workers."""
        with named("cluster_tls_cert, cluster_tls_key, cluster_tls_ca"):
            return ClusterConfig(self.cluster_secret_file, self.cluster_tls_cert, self.cluster_tls_key, self.cluster_tls_ca)

    @property
    def listen_address(self) -> tuple[str, int]:
        """Host and port of the router. Port 0 lets the system choose."""
        return read_address("listen", self.listen)

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the router's HTTP door; None when it has none."""
        return read_address("http_listen", self.http_listen) if self.http_listen else None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "configuration") -> Self:
        """Build from YAML-like values. Raises InvalidConfig that names the key, and the nearest one when it is unknown."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        converted: dict[str, Any] = {}
        for key, value in values.items():
            name = str(key).replace("-", "_")
            if name not in fields:
                raise InvalidConfig(f"{source}: unknown key {str(key)!r}; {nearest(name, fields)}")
            if name == "transfer":
                converted[name] = _transfer(source, value)
            elif name == "autoscale":
                converted[name] = AutoscaleConfig(**read_section(source, name, value, AutoscaleConfig, "interval_s: 5.0"))
            else:
                converted[name] = convert(source, name, value, fields[name].default)
        if converted.get("colocated"):
            _refuse_beside_colocated(source, converted, fields)
            converted["prefill_workers"] = 0
        return cls(**converted)

    def to_mapping(self) -> dict[str, Any]:
        """A JSON-able mapping that `from_mapping` reads back."""
        values = dataclasses.asdict(self) | {"visibilities": list(self.visibilities)}
        for key in _SET_ABOVE:
            del values["transfer"][key]
        return values

    @property
    def beat_s(self) -> float:
        """How often router and controller say that they move, so that silence of `hang_timeout_s` is no accident."""
        return min(1.0, self.hang_timeout_s / 8)

    @property
    def router_names(self) -> tuple[str, ...]:
        """`router`, `router-1`, …"""
        return ("router", *(f"router-{index}" for index in range(1, self.routers)))

    @property
    def metrics_addresses(self) -> dict[str, str]:
        """host:port of each process's /metrics, by `router`, `controller` and worker id; empty when metrics are off."""
        if not self.metrics_port:
            return {}
        workers = [f"{pool}-{index}" for pool in Pool for index in range(self.num_workers(pool))]
        names = ("router", "controller", *workers, *self.router_names[1:])
        addresses = {
            name: f"{self.worker_host if name in workers else self.own_host}:{self.metrics_port + offset}"
            for offset, name in enumerate(names)
        }
        if self.worker_metrics_port:
            addresses |= dict.fromkeys(workers, f"{self.worker_host}:{self.worker_metrics_port}")
        return addresses

    @property
    def own_host(self) -> str:
        """The interface that the processes of this machine bind to, workers apart."""
        if self.worker_host != NODE:
            return self.worker_host
        return read_address("controller_listen", self.controller_listen)[0] if self.controller_listen else "127.0.0.1"

    def metrics_address(self, worker_id: str) -> str:
        """The same of one worker, also one beyond the configured sizes; "" when metrics are off. Raises InvalidConfig."""
        if self.worker_metrics_port:
            return f"{self.worker_host}:{self.worker_metrics_port}"
        if not self.metrics_port:
            return ""
        if (known := self.metrics_addresses.get(worker_id)) is not None:
            return known
        pool_name, _, index = worker_id.rpartition("-")
        pools = list(Pool)
        beyond = int(index) - self.num_workers(Pool(pool_name))
        port = self.metrics_port + len(self.metrics_addresses) + len(pools) * beyond + pools.index(Pool(pool_name))
        if port > 65535:
            raise InvalidConfig(f"metrics_port {self.metrics_port} leaves no port for the metrics of {worker_id}")
        return f"{self.worker_host}:{port}"

    def num_workers(self, pool: Pool) -> int:
        return self.prefill_workers if pool is Pool.PREFILL else self.decode_workers

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Those that have workers."""
        return tuple(pool for pool in Pool if self.num_workers(pool))

    def autoscale_bounds(self, pool: Pool) -> Bounds | None:
        """What a pool scales between; None when it keeps its size."""
        name = f"autoscale_{pool}"
        with named(name):
            return Bounds.parse(getattr(self, name)) if getattr(self, name) else None

    def cpus(self, pool: Pool) -> tuple[int, ...]:
        """What the workers of a pool are kept to; empty: any CPU."""
        name = f"{pool}_cpus"
        with named(name):
            return parse_cpus(getattr(self, name))

    @property
    def kv_backend(self) -> str:
        """How KV crosses: as asked, or what suits where the workers run."""
        return choose_backend(on_one_machine=not self.ray_address) if self.transfer_backend == AUTO else self.transfer_backend

    def worker(self, pool: Pool, worker_id: str = "", epoch: int = 0) -> WorkerConfig:
        """What one worker of a pool is told. Raises InvalidConfig."""
        transfer = self.transfer.within(self.token_budget)
        return WorkerConfig(
            worker_id=worker_id or f"{pool}-0",
            pool=pool,
            model=self.model,
            adapter=self.adapter,
            adapter_any_visibility=self.adapter_any_visibility,
            epoch=epoch,
            dtype=DType(self.dtype),
            num_threads=self.threads_per_worker,
            cpus=self.cpus(pool),
            block_size=self.block_size,
            kv_memory_bytes=self.kv_memory,
            max_context_tokens=self.max_context_tokens or None,
            token_budget=self.token_budget,
            prefix_cache=self.prefix_cache,
            preemption=self.preemption,
            max_running_requests=self.max_requests,
            allowed_visibilities=tuple(Visibility.parse(text) for text in self.visibilities),
            max_boundary_tokens=self.max_boundary_tokens,
            sees_images=self.max_images > 0,
            colocated=self.colocated and pool is Pool.DECODE,
            host=self.worker_host,
            port=self.worker_port,
            cluster=self.cluster,
            transfer=replace(transfer, backend=self.kv_backend, host=self.worker_host),
            chaos=self.chaos,
        )


def _refuse_beside_colocated(source: str, given: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Without a prefill pool these settings mean nothing. Raises InvalidConfig."""
    neutral = {
        name: fields[name].default for name in ("prefill_cpus", "local_prefill_tokens", "local_cached_share", "transfer_backend")
    }
    for name, value in (neutral | {"prefill_fallback": False, "prefill_workers": 0}).items():
        if given.get(name, value) != value:
            raise InvalidConfig(f"{source}: colocated and {name} contradict each other: there is no prefill pool; leave one out")


def _transfer(source: str, values: Any) -> TransferConfig:
    section = read_section(source, "transfer", values, TransferConfig, "heartbeat_s: 1.0")
    for key, owner in _SET_ABOVE.items():
        if key in section:
            raise InvalidConfig(f"{source}: transfer.{key} would have no effect here; set {owner}")
    return TransferConfig(**section)
