"""One look at a server's pools: its list of workers joined with their loads. Knows the public messages; draws nothing."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from shoal.pb.v1 import shoal_pb2

SILENT: Final = "silent"  # shown for a worker that should report its load and does not


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a worker reports, or the sum over a pool."""

    num_running: int = 0  # requests
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0  # neither used nor free: given up when needed
    num_total_blocks: int = 0
    num_reservations: int = 0
    num_transfers_in_flight: int = 0
    num_staging_in_use: int = 0  # buffers
    num_staging_quarantined: int = 0
    outstanding_token_layers: int = 0
    resident_bytes: int = 0

    @classmethod
    def read(cls, load: shoal_pb2.WorkerLoad) -> Self:
        """From the public message."""
        return cls(
            num_running=load.num_running_reqs,
            num_waiting=load.num_waiting_reqs,
            num_used_blocks=load.num_used_blocks,
            num_cached_blocks=load.num_cached_blocks,
            num_total_blocks=load.num_total_blocks,
            num_reservations=load.num_reservations,
            num_transfers_in_flight=load.num_transfers_in_flight,
            num_staging_in_use=load.num_staging_in_use,
            num_staging_quarantined=load.num_staging_quarantined,
            outstanding_token_layers=load.outstanding_token_layers,
            resident_bytes=load.resident_bytes,
        )

    @classmethod
    def total(cls, parts: Iterable["Holdings"]) -> Self:
        """Field by field."""
        every = [asdict(part) for part in parts]
        return cls(**{name: sum(part[name] for part in every) for name in asdict(cls())})


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker; `holds` is None when it gave no report."""

    worker_id: str
    pool: str
    state: str  # the server's word, or `silent`
    epoch: int
    address: str
    holds: Holdings | None
    colocated: bool = False  # it prefills every prompt itself


@dataclass(frozen=True, slots=True)
class QualityRow:
    """What the router asked has measured of one shallow visibility against full depth."""

    visibility: str
    state: str  # served; full: its requests are served at full depth
    reason: str  # which bound it had left
    num_samples: int  # requests in the window
    agreement: float
    kl_nats: float  # per token
    num_replaced_requests: int

    @classmethod
    def read(cls, message: shoal_pb2.VisibilityQuality) -> Self:
        """From the public message."""
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class PoolsFrame:
    """A whole look."""

    address: str
    version: str
    uptime_s: float
    num_active_requests: int
    workers: tuple[WorkerRow, ...]  # prefill first, then by id
    quality: tuple[QualityRow, ...] = ()  # where requests are replayed at full depth

    @classmethod
    def read(cls, address: str, info: shoal_pb2.GetServerInfoResponse, loads: Iterable[shoal_pb2.WorkerLoad]) -> Self:
        """Join both answers by worker; a load of a worker that is no longer listed is left out."""
        reported = {load.worker_id: Holdings.read(load) for load in loads}
        rows = [_row(worker, reported.get(worker.worker_id)) for worker in info.workers]
        rows.sort(key=lambda row: (row.pool != "prefill", row.pool, row.worker_id, row.epoch))
        quality = tuple(map(QualityRow.read, info.quality))
        return cls(address, info.version, info.uptime_seconds, info.active_requests, tuple(rows), quality)

    def totals(self) -> dict[str, Holdings]:
        """By pool, over the workers that report."""
        pools = dict.fromkeys(row.pool for row in self.workers)
        return {p: Holdings.total(row.holds for row in self.workers if row.pool == p and row.holds) for p in pools}

    def to_mapping(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"totals": {pool: asdict(total) for pool, total in self.totals().items()}}


def _row(worker: shoal_pb2.WorkerInfo, holds: Holdings | None) -> WorkerRow:
    asked = worker.state in ("ready", "draining")  # the others are not asked for their load
    state = SILENT if asked and holds is None else worker.state
    return WorkerRow(
        worker.worker_id, worker.pool, state, worker.epoch, worker.address, holds if asked else None, worker.colocated
    )
