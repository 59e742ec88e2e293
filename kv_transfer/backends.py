"""Backends by name, and what each allows at once. Knows which channel class to build; knows no attempts and no streams."""

import sys
from typing import Protocol

import torch

from shoal.config.transfer import BACKENDS, SHARED_MEMORY, TransferConfig
from shoal.errors import InvalidConfig
from shoal.kv_transfer.channel import NoChannel, PairChannel
from shoal.kv_transfer.gloo import GlooChannel, gloo_device
from shoal.kv_transfer.ordered import OneAtATime, OrderedGlooChannel
from shoal.kv_transfer.rendezvous import PairStore
from shoal.kv_transfer.selftest import check_gloo

DECODE_RANK, PREFILL_RANK = 0, 1


class Backend(Protocol):
    """What one worker shares over all its pairs."""

    name: str
    max_outstanding: int | None  # receives (and sends) per worker over all pairs; None = bounded by staging only
    max_joined_bytes: int  # of a message with several entries
    device: torch.device  # where staging lives

    def connect(self, store: PairStore, rank: int, timeout_s: float) -> PairChannel:
        """Join a pair; blocks, so it is called in a thread of the pair's own. Raises Unavailable."""
        ...


def make_backend(config: TransferConfig) -> Backend:
    """The configured backend. Raises InvalidConfig when this machine cannot run it."""
    if config.backend == "gloo":
        return _Gloo(config)
    if config.backend == "ordered-gloo":
        return _OrderedGloo(config)
    if config.backend == "nccl":
        return _Nccl(config)
    if config.backend == SHARED_MEMORY:
        return _SharedMemory()
    raise InvalidConfig(f"transfer backend {config.backend!r} is unknown; choose one of {', '.join(BACKENDS)}")


class _Gloo:
    name = "gloo"
    max_outstanding: int | None = None
    device = torch.device("cpu")

    def __init__(self, config: TransferConfig) -> None:
        self._host = host = config.host
        self.max_joined_bytes = config.max_entry_bytes
        try:
            gloo_device(host)
        except RuntimeError:
            raise InvalidConfig(f"transfer.host {host!r} is no address of this machine that Gloo can bind") from None
        check_gloo(host)

    def connect(self, store: PairStore, rank: int, timeout_s: float) -> PairChannel:
        return GlooChannel(store, rank, self._host, timeout_s)


class _OrderedGloo(_Gloo):
    name = "ordered-gloo"
    max_outstanding: int | None = 1

    def __init__(self, config: TransferConfig) -> None:
        super().__init__(config)
        self._receives, self._sends = OneAtATime("receive"), OneAtATime("send")

    def connect(self, store: PairStore, rank: int, timeout_s: float) -> PairChannel:
        return OrderedGlooChannel(store, rank, self._host, timeout_s, self._receives, self._sends)


class _SharedMemory:
    """Decode reads prefill's pool itself (lending.py): a pair has a control stream and no channel."""

    name = SHARED_MEMORY
    max_outstanding: int | None = None
    max_joined_bytes = sys.maxsize  # a message is words only, its entries are read one by one
    device = torch.device("cpu")

    def connect(self, store: PairStore, rank: int, timeout_s: float) -> PairChannel:
        return NoChannel()


class _Nccl:
    name = "nccl"
    max_outstanding: int | None = 1

    def __init__(self, config: TransferConfig) -> None:
        from shoal.kv_transfer.nccl import check_environment

        check_environment()
        self.max_joined_bytes = config.max_entry_bytes
        self.device = torch.device("cuda", torch.cuda.current_device())

    def connect(self, store: PairStore, rank: int, timeout_s: float) -> PairChannel:
        from shoal.kv_transfer.nccl import NcclChannel

        return NcclChannel(store, rank, self.device)
