"""Settings of the KV transfer. What both ends must share travels in the fingerprint."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from shoal.errors import InvalidConfig

SHARED_MEMORY = "shared-memory"
AUTO = "auto"  # of `shoal serve`; a worker is told one of the others
BACKENDS = ("gloo", "nccl", SHARED_MEMORY, "ordered-gloo")


def choose_backend(*, on_one_machine: bool) -> str:
    """Shared memory where all workers run on this machine and compute on its CPUs, else Gloo."""
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    return SHARED_MEMORY if on_one_machine and sys.platform.startswith("linux") and not has_gpu else "gloo"


# Must stand in a worker's environment before torch is imported: else a dead peer takes the survivor down with it, and each
# pair holds more GPU memory than its traffic needs (torch's and NCCL's documentation).
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "NCCL_MAX_NCHANNELS": "4",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}

MAX_HEARTBEAT_S = 60.0


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Raises InvalidConfig when a value cannot work."""

    host: str = "127.0.0.1"  # the interface that Gloo binds to
    backend: str = "gloo"
    max_entry_bytes: int = 8 << 20
    max_entry_tokens: int = 2048  # `shoal serve` takes no more than its token_budget, so that each chunk's KV leaves with it
    gathered_bytes: int = 8 << 20  # a message leaves when it has so many, when only the last layer is missing, at a step's end
    num_staging_buffers: int = 8  # per worker, each of max_entry_bytes at most
    max_receives_in_flight: int = 4  # per pair; 1 on NCCL
    max_pairs: int = 64
    heartbeat_s: float = 1.0
    heartbeat_misses: int = 3  # a peer silent for heartbeat_s × this is dead
    connect_timeout_s: float = 5.0
    min_rate_bytes_per_s: float = 16e6  # sizes the timeout of a posted message
    base_timeout_s: float = 5.0
    lease_s: float = 30.0  # a reservation without Accept, an Open, a Ready or a Trailer without its answer
    pair_idle_s: float = 300.0  # a pair without a transfer for so long is torn down
    max_deadline_s: float = 3600.0  # no request lives longer; ids of ended attempts are remembered for so long

    def within(self, token_budget: int) -> Self:
        """No message spans more tokens than one prefill step: it would leave with its last step, and nothing before."""
        return replace(self, max_entry_tokens=min(self.max_entry_tokens, token_budget))

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise InvalidConfig(f"transfer backend {self.backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
        for name in (
            "max_entry_bytes",
            "max_entry_tokens",
            "gathered_bytes",
            "num_staging_buffers",
            "max_receives_in_flight",
            "max_pairs",
            "heartbeat_misses",
        ):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"transfer.{name} must be at least 1")
        if self.heartbeat_s > MAX_HEARTBEAT_S:
            raise InvalidConfig(f"transfer.heartbeat_s must be at most {MAX_HEARTBEAT_S:g}, or a hung peer goes unnoticed")
        for name in (
            "heartbeat_s",
            "connect_timeout_s",
            "min_rate_bytes_per_s",
            "base_timeout_s",
            "lease_s",
            "pair_idle_s",
            "max_deadline_s",
        ):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"transfer.{name} must be greater than 0")

    @property
    def peer_timeout_s(self) -> float:
        """How long a peer may be silent before its pair is given up."""
        return self.heartbeat_s * self.heartbeat_misses

    def message_timeout_s(self, num_bytes: int) -> float:
        """How long a posted send or receive of so many bytes may take before its pair is given up."""
        return self.base_timeout_s + num_bytes / self.min_rate_bytes_per_s
