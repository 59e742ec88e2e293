"""Settings of one router. Knows addresses and limits; opens nothing."""

import math
from dataclasses import dataclass, field
from typing import Final

from shoal.config.disaggregation import LOCAL_CACHED_SHARE, LOCAL_PREFILL_TOKENS, DisaggregationRule
from shoal.config.images import ImageLimits
from shoal.config.shadow import ShadowConfig
from shoal.config.tls import ClusterConfig, TlsConfig
from shoal.errors import InvalidConfig
from shoal.visibility import Visibility

HTTP_MAX_BODY_MB: Final = 8.0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Raises InvalidConfig when a value cannot work. Endpoints come from a controller, or from a fixed list of workers."""

    model: str  # name or path, as shoal.model_files.open_model takes it
    listen: str = "127.0.0.1:50051"
    http_listen: str | None = None  # host:port of OpenAI's API
    health_listen: str | None = None  # host:port of gRPC health alone, without TLS, for probes
    http_max_body_bytes: int = int(HTTP_MAX_BODY_MB * 1e6)
    http_body_timeout_s: float = 60.0
    controller: str | None = None  # host:port
    workers: tuple[str, ...] = ()  # pool=host:port, instead of a controller
    visibilities: tuple[Visibility, ...] = field(default=(Visibility(),))  # the first is the default
    max_boundary_tokens: int = 64
    max_context: int | None = None  # tokens; None = the model's own
    max_retries: int = 1
    max_wait_s: float = 60.0  # a request that would wait longer for its start is refused at once; 0: none is
    local_prefill_tokens: int = LOCAL_PREFILL_TOKENS  # fewer uncached prefill tokens run on the decode worker
    local_cached_share: float = LOCAL_CACHED_SHARE  # so do those of prompts of which decode holds at least this share
    prefill_fallback: bool = False  # and all others while no prefill worker is live; else they are UNAVAILABLE
    flush_s: float = 0.02  # tokens wait this long at most for others to share a message
    flush_tokens: int = 16
    max_queued_tokens: int = 256  # per stream; beyond it a slow reader slows its own request
    max_request_s: float = 3600.0  # the deadline of a request that brings none
    load_interval_s: float = 1.0
    drain_s: float = 30.0  # how long running requests may go on after SIGTERM
    metrics: str | None = None  # host:port of /metrics
    shadow: ShadowConfig = field(default_factory=ShadowConfig)  # which share is replayed at full depth, and the band of quality
    images: ImageLimits = field(default_factory=ImageLimits)
    allow_wildcard: bool = False
    tokens_file: str | None = None  # who may call; None: everybody
    tls: TlsConfig = field(default_factory=TlsConfig)  # of both doors
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # of the way to workers and controller

    @property
    def disaggregation(self) -> DisaggregationRule:
        """When decode prefills a prompt itself."""
        return DisaggregationRule(self.local_prefill_tokens, self.local_cached_share)

    def __post_init__(self) -> None:
        self.disaggregation  # noqa: B018  (raises when the values cannot work)
        if bool(self.controller) == bool(self.workers):
            raise InvalidConfig("a router needs either a controller's address or a list of workers, and not both")
        if not self.visibilities:
            raise InvalidConfig("the list of allowed visibilities is empty; name at least one, as in full")
        for name in ("max_boundary_tokens", "flush_tokens", "max_queued_tokens", "http_max_body_bytes"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"router.{name} must be at least 1")
        for name in ("max_retries", "flush_s", "drain_s", "max_wait_s"):
            if not getattr(self, name) >= 0:
                raise InvalidConfig(f"router.{name} must be 0 or more")
        for name in ("max_request_s", "load_interval_s", "http_body_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"router.{name} must be greater than 0")
        if self.max_context is not None and self.max_context < 2:
            raise InvalidConfig("router.max_context must leave room for a prompt token and a generated one")


def body_bytes(megabytes: float) -> int:
    """What `http_max_body_mb` means; MB are 10^6 bytes. Raises InvalidConfig."""
    if not (math.isfinite(megabytes) and megabytes * 1e6 >= 1):
        raise InvalidConfig(f"http_max_body_mb must be a number greater than 0, not {megabytes:g}")
    return int(megabytes * 1e6)
