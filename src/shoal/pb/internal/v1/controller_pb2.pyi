from shoal.pb.internal.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchEndpointsRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class Endpoints(_message.Message):
    __slots__ = ("version", "endpoints")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, version: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("worker", "state")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    worker: _worker_pb2.WorkerDescription
    state: str
    def __init__(self, worker: _Optional[_Union[_worker_pb2.WorkerDescription, _Mapping]] = ..., state: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill_workers", "decode_workers", "drain_s", "allow_pending", "dry_run")
    PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    ALLOW_PENDING_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    prefill_workers: int
    decode_workers: int
    drain_s: float
    allow_pending: bool
    dry_run: bool
    def __init__(self, prefill_workers: _Optional[int] = ..., decode_workers: _Optional[int] = ..., drain_s: _Optional[float] = ..., allow_pending: bool = ..., dry_run: bool = ...) -> None: ...

class RollingRestartRequest(_message.Message):
    __slots__ = ("pools", "surge", "drain_s", "dry_run")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    SURGE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedScalarFieldContainer[str]
    surge: int
    drain_s: float
    dry_run: bool
    def __init__(self, pools: _Optional[_Iterable[str]] = ..., surge: _Optional[int] = ..., drain_s: _Optional[float] = ..., dry_run: bool = ...) -> None: ...

class PoolEvent(_message.Message):
    __slots__ = ("kind", "worker_id", "message", "seconds", "loaded_bytes", "total_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    worker_id: str
    message: str
    seconds: float
    loaded_bytes: int
    total_bytes: int
    def __init__(self, kind: _Optional[str] = ..., worker_id: _Optional[str] = ..., message: _Optional[str] = ..., seconds: _Optional[float] = ..., loaded_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class WatchScalingRequest(_message.Message):
    __slots__ = ("follow",)
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    follow: bool
    def __init__(self, follow: bool = ...) -> None: ...

class ScalingDecision(_message.Message):
    __slots__ = ("unix_s", "pool", "decision", "because", "num_workers", "num_needed", "num_wanted", "min_workers", "max_workers", "needed_for_work", "needed_for_wait", "needed_for_room", "seen", "dry_run", "message")
    class SeenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTED_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FOR_WORK_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FOR_WAIT_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FOR_ROOM_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    unix_s: float
    pool: str
    decision: str
    because: _containers.RepeatedScalarFieldContainer[str]
    num_workers: int
    num_needed: int
    num_wanted: int
    min_workers: int
    max_workers: int
    needed_for_work: int
    needed_for_wait: int
    needed_for_room: int
    seen: _containers.ScalarMap[str, float]
    dry_run: bool
    message: str
    def __init__(self, unix_s: _Optional[float] = ..., pool: _Optional[str] = ..., decision: _Optional[str] = ..., because: _Optional[_Iterable[str]] = ..., num_workers: _Optional[int] = ..., num_needed: _Optional[int] = ..., num_wanted: _Optional[int] = ..., min_workers: _Optional[int] = ..., max_workers: _Optional[int] = ..., needed_for_work: _Optional[int] = ..., needed_for_wait: _Optional[int] = ..., needed_for_room: _Optional[int] = ..., seen: _Optional[_Mapping[str, float]] = ..., dry_run: bool = ..., message: _Optional[str] = ...) -> None: ...
