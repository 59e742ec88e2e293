from shoal.pb.internal.v1 import worker_pb2 as _worker_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SenderMessage(_message.Message):
    __slots__ = ("hello", "open", "ready", "trailer", "end", "heartbeat", "rendezvous")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: Open
    ready: Ready
    trailer: Trailer
    end: End
    heartbeat: Heartbeat
    rendezvous: Rendezvous
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., trailer: _Optional[_Union[Trailer, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ...) -> None: ...

class ReceiverMessage(_message.Message):
    __slots__ = ("welcome", "accept", "reject", "go", "skip", "ack", "heartbeat", "rendezvous")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    GO_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    accept: Accept
    reject: Reject
    go: Go
    skip: Skip
    ack: Ack
    heartbeat: Heartbeat
    rendezvous: Rendezvous
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ..., reject: _Optional[_Union[Reject, _Mapping]] = ..., go: _Optional[_Union[Go, _Mapping]] = ..., skip: _Optional[_Union[Skip, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "epoch", "fingerprint", "decode_worker_id", "decode_epoch", "backend", "pool")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    fingerprint: _worker_pb2.Fingerprint
    decode_worker_id: str
    decode_epoch: int
    backend: str
    pool: SharedPool
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[_Union[_worker_pb2.Fingerprint, _Mapping]] = ..., decode_worker_id: _Optional[str] = ..., decode_epoch: _Optional[int] = ..., backend: _Optional[str] = ..., pool: _Optional[_Union[SharedPool, _Mapping]] = ...) -> None: ...

class SharedPool(_message.Message):
    __slots__ = ("pid", "descriptor", "num_bytes", "secret")
    PID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    pid: int
    descriptor: int
    num_bytes: int
    secret: bytes
    def __init__(self, pid: _Optional[int] = ..., descriptor: _Optional[int] = ..., num_bytes: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("heartbeat_s",)
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    def __init__(self, heartbeat_s: _Optional[float] = ...) -> None: ...

class Rendezvous(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("attempt_id", "handle")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    handle: bytes
    def __init__(self, attempt_id: _Optional[str] = ..., handle: _Optional[bytes] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("attempt_id", "code", "reason")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    code: str
    reason: str
    def __init__(self, attempt_id: _Optional[str] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("n", "attempt_id", "entry", "num_bytes", "num_more", "lent")
    N_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_MORE_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    n: int
    attempt_id: str
    entry: int
    num_bytes: int
    num_more: int
    lent: Lent
    def __init__(self, n: _Optional[int] = ..., attempt_id: _Optional[str] = ..., entry: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_more: _Optional[int] = ..., lent: _Optional[_Union[Lent, _Mapping]] = ...) -> None: ...

class Lent(_message.Message):
    __slots__ = ("slot", "number", "lower", "upper", "states", "first_state")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOWER_FIELD_NUMBER: _ClassVar[int]
    UPPER_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    FIRST_STATE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    number: int
    lower: BlockIds
    upper: BlockIds
    states: BlockIds
    first_state: int
    def __init__(self, slot: _Optional[int] = ..., number: _Optional[int] = ..., lower: _Optional[_Union[BlockIds, _Mapping]] = ..., upper: _Optional[_Union[BlockIds, _Mapping]] = ..., states: _Optional[_Union[BlockIds, _Mapping]] = ..., first_state: _Optional[int] = ...) -> None: ...

class BlockIds(_message.Message):
    __slots__ = ("first_layer", "num_rows", "ids")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    num_rows: int
    ids: bytes
    def __init__(self, first_layer: _Optional[int] = ..., num_rows: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class Go(_message.Message):
    __slots__ = ("n",)
    N_FIELD_NUMBER: _ClassVar[int]
    n: int
    def __init__(self, n: _Optional[int] = ...) -> None: ...

class Skip(_message.Message):
    __slots__ = ("n",)
    N_FIELD_NUMBER: _ClassVar[int]
    n: int
    def __init__(self, n: _Optional[int] = ...) -> None: ...

class Trailer(_message.Message):
    __slots__ = ("attempt_id", "checksum")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    checksum: int
    def __init__(self, attempt_id: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("attempt_id", "last_n", "reason")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_N_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    last_n: int
    reason: str
    def __init__(self, attempt_id: _Optional[str] = ..., last_n: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...
