"""Settings of one worker, prefill or decode. Knows names, sizes and limits; loads nothing.

A configuration crosses a process border as a plain JSON-able mapping (`to_dict`, `from_dict`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, Self

from shoal.config.tls import ClusterConfig
from shoal.config.transfer import TransferConfig
from shoal.errors import InvalidConfig, InvalidRequest
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility

DEVICES = ("auto", "cpu", "cuda")
NODE = "node"  # as a host: the address by which Ray knows the node that the worker is placed on


MAX_THREADS: Final = 1024  # beyond these a slip of the finger is likelier than a wish
MAX_TOKEN_BUDGET: Final = 1 << 20


class Pool(StrEnum):
    """Which half of a request a worker runs."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Raises InvalidConfig when a value cannot work; the message names the field and what to change."""

    worker_id: str
    pool: Pool
    model: str  # a known model's name or a path
    adapter: str = ""  # the folder of a LoRA adapter for it, merged at load; "": none
    adapter_any_visibility: bool = False  # serve it under other visibilities than the one it was tuned for
    epoch: int = 0  # the worker's incarnation; a restarted worker has a higher one
    dtype: DType = DType.FLOAT32
    num_threads: int = 1  # of the step thread's tensor operations
    cpus: tuple[int, ...] = ()  # the CPUs that all threads of the process are kept to; none: any
    device: str = "auto"  # "cpu", "cuda", or the GPU where the process sees one
    backend: str = "auto"  # who computes: "native" (compiled, CPU), "triton" (CUDA), "torch", or the first that works
    block_size: int = 16  # tokens
    num_blocks: int | None = None  # None: as many as fit kv_memory_bytes
    kv_memory_bytes: int = 1 << 30
    min_request_tokens: int = 128  # the pool must hold one request of this size at full depth
    max_context_tokens: int | None = None  # None: the model's own limit
    token_budget: int = 512  # tokens of one step: the compute chunk of prefill
    prefix_cache: bool = True  # keep the KV of prefixes for requests to come; given up when blocks are needed
    preemption: bool = False  # reserve room for the next tokens alone, and let the least senior give way when blocks run out
    max_running_requests: int = 64  # requests that hold blocks
    max_queued: int = 256  # requests that wait for blocks, or for their images to be seen; beyond, CapacityExceeded
    max_request_s: float = 3600.0  # imposed on calls that bring no deadline, and the cap of those that do
    stall_timeout_s: float = 120.0  # nothing moves for so long though it should: health is NOT_SERVING until it does
    allowed_visibilities: tuple[Visibility, ...] = (Visibility(),)  # the first is the default; boundaries do not count
    max_boundary_tokens: int = 64
    sees_images: bool = True  # a prefill worker holds the vision tower of a model that has one
    colocated: bool = False  # a decode worker that prefills every prompt itself: there is no prefill pool
    host: str = "127.0.0.1"  # the interface to bind, or NODE
    port: int = 0  # 0: any free port
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # who may call this worker, and as whom it calls others
    transfer: TransferConfig = field(default_factory=TransferConfig)
    check_blocks: bool = False  # verify the pool's invariant after every step
    chaos: bool = False  # permit fault injection through SHOAL_FAULTS

    def __post_init__(self) -> None:
        if not self.worker_id:
            raise InvalidConfig("worker_id must not be empty")
        if not self.model:
            raise InvalidConfig("model must name a known model or a path; `shoal models` lists the known ones")
        if self.device not in DEVICES:
            raise InvalidConfig(f"device must be one of {', '.join(DEVICES)}, not {self.device!r}")
        floors = {
            "epoch": 0,
            "num_threads": 1,
            "block_size": 1,
            "kv_memory_bytes": 1,
            "min_request_tokens": 2,
            "token_budget": 1,
            "max_running_requests": 1,
            "max_queued": 0,
            "max_boundary_tokens": 1,
        }
        for name, floor in floors.items():
            if getattr(self, name) < floor:
                raise InvalidConfig(f"{name} must be at least {floor}, not {getattr(self, name)}")
        for name, ceiling in (("num_threads", MAX_THREADS), ("token_budget", MAX_TOKEN_BUDGET)):
            if getattr(self, name) > ceiling:
                raise InvalidConfig(f"{name} must be at most {ceiling}, not {getattr(self, name)}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise InvalidConfig(f"num_blocks must be at least 1, not {self.num_blocks}")
        if self.max_context_tokens is not None and self.max_context_tokens < 2:
            raise InvalidConfig(f"max_context_tokens must be at least 2, not {self.max_context_tokens}")
        if self.colocated and self.pool is not Pool.DECODE:
            raise InvalidConfig(
                "colocated is for decode workers: they prefill prompts themselves; a prefill worker cannot decode"
            )
        for name in ("max_request_s", "stall_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name} must be greater than 0, not {getattr(self, name)}")
        if not 0 <= self.port < 1 << 16:
            raise InvalidConfig(f"port must lie in 0…65535, not {self.port}")
        if not self.allowed_visibilities:
            raise InvalidConfig("allowed_visibilities must name at least one, for instance 'full'")

    def allowed_policies(self, num_layers: int) -> tuple[Visibility, ...]:
        """The allow-list without boundaries, K = L folded into `full`. Raises InvalidConfig when a depth exceeds the model."""
        try:
            return tuple(dict.fromkeys(allowed.resolve(num_layers).policy for allowed in self.allowed_visibilities))
        except InvalidRequest as error:
            raise InvalidConfig(f"allowed_visibilities: {error}") from None

    def accept_visibility(self, text: str, num_layers: int) -> Visibility:
        """Parse a request's resolved visibility. Raises InvalidRequest unless the allow-list and the boundary limit hold it."""
        visibility = Visibility.parse(text)
        if visibility.boundary_tokens is None:
            raise InvalidRequest(f"visibility {text!r} is not resolved: add :boundary=b")
        visibility = visibility.resolve(num_layers)
        allowed = self.allowed_policies(num_layers)
        if visibility.policy not in allowed:
            names = ", ".join(str(policy) for policy in allowed)
            raise InvalidRequest(f"visibility {text!r} is not allowed on this worker; allowed: {names}")
        if (visibility.boundary_tokens or 1) > self.max_boundary_tokens:
            raise InvalidRequest(f"visibility {text!r}: boundary exceeds the limit of {self.max_boundary_tokens} tokens")
        return visibility

    def max_context(self, shape: ModelShape) -> int:
        """Tokens of prompt and answer together, at most."""
        return shape.max_context if self.max_context_tokens is None else min(self.max_context_tokens, shape.max_context)

    def pool_tokens(self, shape: ModelShape) -> int:
        """Tokens of one request at full depth that the KV pool holds. Raises InvalidConfig as `pool_blocks`."""
        return self.pool_blocks(shape) // shape.num_layers * self.block_size

    def pool_blocks(self, shape: ModelShape) -> int:
        """Blocks of the KV pool. Raises InvalidConfig when they cannot hold one request of min_request_tokens at full depth."""
        block_bytes = self.block_size * shape.kv_elements * self.dtype.num_bytes
        num_blocks = self.kv_memory_bytes // block_bytes if self.num_blocks is None else self.num_blocks
        needed = shape.num_layers * -(-min(self.min_request_tokens, self.max_context(shape)) // self.block_size)
        if num_blocks < needed:
            raise InvalidConfig(
                f"too little KV memory: one request of {self.min_request_tokens} tokens takes {needed} blocks"
                f" ({needed * block_bytes / 1e6:.1f} MB), the pool has {num_blocks};"
                f" raise {'kv_memory_bytes' if self.num_blocks is None else 'num_blocks'}"
            )
        return num_blocks

    def check_entries(self, shape: ModelShape) -> None:
        """Raise InvalidConfig when transfer.max_entry_bytes cannot hold one token of one layer, the least that can be sent."""
        least = max(shape.kv_elements, shape.hidden_size) * self.dtype.num_bytes
        if self.transfer.max_entry_bytes < least:
            raise InvalidConfig(
                f"transfer.max_entry_bytes must be at least {least} (a token), not {self.transfer.max_entry_bytes}"
            )

    def placed_at(self, host: str) -> Self:
        """The same with NODE replaced, for gRPC and for KV."""
        return replace(self, host=host, transfer=replace(self.transfer, host=host)) if self.host == NODE else self

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able mapping that `from_dict` reads back."""
        return asdict(self) | {
            "pool": str(self.pool),
            "dtype": str(self.dtype),
            "allowed_visibilities": [str(allowed) for allowed in self.allowed_visibilities],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote. Raises InvalidConfig for unknown, missing or unusable values, by name."""
        known = dict(values)
        _refuse_unknown("worker", known, cls)
        transfer, cluster = dict(known.pop("transfer", {})), dict(known.pop("cluster", {}))
        _refuse_unknown("transfer", transfer, TransferConfig)
        _refuse_unknown("cluster", cluster, ClusterConfig)
        try:
            if "pool" in known:
                known["pool"] = Pool(known["pool"])
            if "dtype" in known:
                known["dtype"] = DType(known["dtype"])
            known["cpus"] = tuple(known.get("cpus", ()))
            if "allowed_visibilities" in known:
                known["allowed_visibilities"] = tuple(Visibility.parse(text) for text in known["allowed_visibilities"])
            return cls(**known, transfer=TransferConfig(**transfer), cluster=ClusterConfig(**cluster))
        except (TypeError, ValueError, InvalidRequest) as error:
            raise error if isinstance(error, InvalidConfig) else InvalidConfig(f"worker configuration: {error}") from None


def _refuse_unknown(what: str, values: Mapping[str, Any], owner: type) -> None:
    unknown = set(values) - {field.name for field in fields(owner)}
    if unknown:
        raise InvalidConfig(f"{what} configuration has unknown entries: {', '.join(sorted(unknown))}")
