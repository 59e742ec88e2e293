from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[SessionRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[SessionRequest, _Mapping]]] = ...) -> None: ...

class SessionReplies(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[SessionReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[SessionReply, _Mapping]]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("call", "start", "cancel", "pause", "resume")
    CALL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    call: int
    start: StartCall
    cancel: CancelCall
    pause: PauseCall
    resume: ResumeCall
    def __init__(self, call: _Optional[int] = ..., start: _Optional[_Union[StartCall, _Mapping]] = ..., cancel: _Optional[_Union[CancelCall, _Mapping]] = ..., pause: _Optional[_Union[PauseCall, _Mapping]] = ..., resume: _Optional[_Union[ResumeCall, _Mapping]] = ...) -> None: ...

class StartCall(_message.Message):
    __slots__ = ("method", "message", "timeout_s", "metadata")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    method: str
    message: bytes
    timeout_s: float
    metadata: _containers.RepeatedCompositeFieldContainer[SessionMetadata]
    def __init__(self, method: _Optional[str] = ..., message: _Optional[bytes] = ..., timeout_s: _Optional[float] = ..., metadata: _Optional[_Iterable[_Union[SessionMetadata, _Mapping]]] = ...) -> None: ...

class CancelCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("call", "message", "end")
    CALL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    call: int
    message: bytes
    end: EndOfCall
    def __init__(self, call: _Optional[int] = ..., message: _Optional[bytes] = ..., end: _Optional[_Union[EndOfCall, _Mapping]] = ...) -> None: ...

class EndOfCall(_message.Message):
    __slots__ = ("code", "details", "trailing")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    TRAILING_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    trailing: _containers.RepeatedCompositeFieldContainer[SessionMetadata]
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ..., trailing: _Optional[_Iterable[_Union[SessionMetadata, _Mapping]]] = ...) -> None: ...

class SessionMetadata(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
