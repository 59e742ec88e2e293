"""Settings of autoscaling: bounds, targets, cool-downs, and who brings machines. Knows no pool and no cluster."""

import math
import re
from dataclasses import dataclass
from typing import Final, Self

from shoal.errors import InvalidConfig

NODES: Final = ("fixed", "ray", "kuberay")
_BOUNDS: Final = re.compile(r"(\d{1,6})-(\d{1,6})")
_DNS_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.\-]{0,251}[a-z0-9])?")
_WITHOUT_CLUSTER: Final = ("namespace", "kubernetes_api", "kubernetes_token_file", "kubernetes_ca_file")


@dataclass(frozen=True, slots=True)
class Bounds:
    """How few and how many workers a pool may have. Raises InvalidConfig."""

    min_workers: int
    max_workers: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise InvalidConfig(
                f"a pool scales between MIN and MAX workers, 1 ≤ MIN ≤ MAX, not {self.min_workers} and {self.max_workers}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """'1-4' → 1 and 4."""
        match = _BOUNDS.fullmatch(text.strip())
        if match is None:
            raise InvalidConfig(f"{text!r} should be MIN-MAX workers, as in 1-4")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.min_workers}-{self.max_workers}"


@dataclass(frozen=True, slots=True)
class AutoscaleConfig:
    """What the YAML mapping `autoscale:` may hold, beside the flags `--autoscale-…`. Raises InvalidConfig when it cannot work."""

    interval_s: float = 5.0  # how often the pools are looked at
    ttft_s: float = 1.0  # the targets that the need is predicted for
    tpot_s: float = 0.05
    quantile: float = 0.95  # of the requests that ttft_s is to hold for
    target_utilisation: float = 0.7  # of a worker's rate of work
    target_occupancy: float = 0.8  # of its batch, and of its KV blocks
    hysteresis: float = 0.1  # share of both that must be to spare before a worker goes
    backlog_s: float = 10.0  # what waits should be worked off within this
    up_cooldown_s: float = 15.0  # between two steps up
    down_cooldown_s: float = 300.0  # how long the need must stay lower before a worker goes, and between two that go
    start_s: float = 60.0  # how long a new worker takes, its machine included: so far ahead arrivals are forecast
    profile: str = ""  # a file of `shoal calibrate`; "": learn from the workers' own steps
    raycluster: str = ""  # with nodes kuberay: the RayCluster
    namespace: str = ""  # its namespace; "": the controller's own
    prefill_group: str = "prefill"  # its worker groups
    decode_group: str = "decode"
    kubernetes_api: str = ""  # "": the cluster that the controller runs in; else a URL, as `kubectl proxy` prints it
    kubernetes_token_file: str = ""  # with kubernetes_api: a bearer token
    kubernetes_ca_file: str = ""  # with kubernetes_api: who signed its certificate
    kubernetes_timeout_s: float = 10.0  # of one request, and of all its retries together

    def __post_init__(self) -> None:
        for name in ("interval_s", "ttft_s", "tpot_s", "backlog_s", "kubernetes_timeout_s"):
            self._check(name, getattr(self, name) > 0, "a number of seconds greater than 0")
        for name in ("up_cooldown_s", "down_cooldown_s", "start_s"):
            self._check(name, getattr(self, name) >= 0, "a number of seconds, 0 or more")
        for name in ("target_utilisation", "target_occupancy"):
            self._check(name, 0 < getattr(self, name) <= 1, "a share above 0, at most 1")
        self._check("hysteresis", 0 <= self.hysteresis < 1, "a share of at least 0, below 1")
        self._check("quantile", 0 < self.quantile < 1, "a share between 0 and 1")
        for name in ("raycluster", "namespace", "prefill_group", "decode_group"):
            text = getattr(self, name)
            if text and _DNS_NAME.fullmatch(text) is None:
                raise InvalidConfig(f"autoscale.{name} {text!r} is no name that Kubernetes takes: lower case, digits, - and .")
        if self.prefill_group == self.decode_group:
            raise InvalidConfig(f"autoscale.prefill_group and decode_group are both {self.decode_group!r}; pools scale apart")
        if self.kubernetes_api and not self.kubernetes_api.startswith(("http://", "https://")):
            raise InvalidConfig(f"autoscale.kubernetes_api {self.kubernetes_api!r} should be a URL, as in http://127.0.0.1:8001")
        if not self.kubernetes_api and (self.kubernetes_token_file or self.kubernetes_ca_file):
            raise InvalidConfig("autoscale.kubernetes_token_file and kubernetes_ca_file go with autoscale.kubernetes_api")

    def check_nodes(self, nodes: str) -> None:
        """Raise InvalidConfig when what is said of a RayCluster and of who brings machines contradict each other."""
        if nodes not in NODES:
            raise InvalidConfig(f"autoscale_nodes {nodes!r} is unknown; choose one of {', '.join(NODES)}")
        if nodes == "kuberay" and not self.raycluster:
            raise InvalidConfig(
                "autoscale_nodes kuberay needs the RayCluster's name: raycluster in the mapping autoscale of the --config file"
            )
        given = [name for name in ("raycluster", *_WITHOUT_CLUSTER) if getattr(self, name)]
        if nodes != "kuberay" and given:
            raise InvalidConfig(f"autoscale.{given[0]} has no effect with autoscale_nodes {nodes}; use kuberay, or leave it out")

    def _check(self, name: str, holds: bool, words: str) -> None:
        if not holds or not math.isfinite(getattr(self, name)):
            raise InvalidConfig(f"autoscale.{name} must be {words}, not {getattr(self, name):g}")
