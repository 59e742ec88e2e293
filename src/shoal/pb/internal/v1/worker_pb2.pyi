from shoal.pb.v1 import shoal_pb2 as _shoal_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "num_logprobs", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "constraint")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    constraint: Constraint
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar", "choices_json")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICES_JSON_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    choices_json: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choices_json: _Optional[str] = ...) -> None: ...

class ImageSpan(_message.Message):
    __slots__ = ("start", "num_tokens", "digest", "grid")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_tokens: int
    digest: bytes
    grid: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., digest: _Optional[bytes] = ..., grid: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptImage(_message.Message):
    __slots__ = ("span", "data")
    SPAN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    span: ImageSpan
    data: bytes
    def __init__(self, span: _Optional[_Union[ImageSpan, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("request_id", "caller", "prompt_ids", "replay_token_ids", "visibility", "sampling", "num_children", "prompt_logprobs", "continuation_ids", "priority", "tenant", "cache_salt", "age_s", "child_replays", "local_prefill", "background", "images")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    CHILD_REPLAYS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    caller: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    replay_token_ids: _containers.RepeatedScalarFieldContainer[int]
    visibility: str
    sampling: Sampling
    num_children: int
    prompt_logprobs: int
    continuation_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: str
    tenant: str
    cache_salt: str
    age_s: float
    child_replays: _containers.RepeatedCompositeFieldContainer[ChildReplay]
    local_prefill: LocalPrefill
    background: bool
    images: _containers.RepeatedCompositeFieldContainer[ImageSpan]
    def __init__(self, request_id: _Optional[str] = ..., caller: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., replay_token_ids: _Optional[_Iterable[int]] = ..., visibility: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., num_children: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., continuation_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[str] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., age_s: _Optional[float] = ..., child_replays: _Optional[_Iterable[_Union[ChildReplay, _Mapping]]] = ..., local_prefill: _Optional[_Union[LocalPrefill, _Mapping]] = ..., background: bool = ..., images: _Optional[_Iterable[_Union[ImageSpan, _Mapping]]] = ...) -> None: ...

class LocalPrefill(_message.Message):
    __slots__ = ("below_tokens", "cached_share", "no_prefill_worker")
    BELOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_SHARE_FIELD_NUMBER: _ClassVar[int]
    NO_PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    below_tokens: int
    cached_share: float
    no_prefill_worker: bool
    def __init__(self, below_tokens: _Optional[int] = ..., cached_share: _Optional[float] = ..., no_prefill_worker: bool = ...) -> None: ...

class ChildReplay(_message.Message):
    __slots__ = ("index", "token_ids", "max_tokens", "min_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class EndChildrenRequest(_message.Message):
    __slots__ = ("attempt_id", "indexes")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempt_id: _Optional[str] = ..., indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class EndChildrenResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequestsRequest(_message.Message):
    __slots__ = ("request_ids", "tenant", "caller")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    tenant: str
    caller: str
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., tenant: _Optional[str] = ..., caller: _Optional[str] = ...) -> None: ...

class AbortRequestsResponse(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("attempt_id", "cached_tokens", "visibility", "plan_digest", "plan_bytes", "num_entries", "lease_s", "transfer_address", "worker_id", "epoch", "prefill_at", "prefill_reason")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_AT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_REASON_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    cached_tokens: int
    visibility: str
    plan_digest: str
    plan_bytes: int
    num_entries: int
    lease_s: float
    transfer_address: str
    worker_id: str
    epoch: int
    prefill_at: str
    prefill_reason: str
    def __init__(self, attempt_id: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., visibility: _Optional[str] = ..., plan_digest: _Optional[str] = ..., plan_bytes: _Optional[int] = ..., num_entries: _Optional[int] = ..., lease_s: _Optional[float] = ..., transfer_address: _Optional[str] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prefill_at: _Optional[str] = ..., prefill_reason: _Optional[str] = ...) -> None: ...

class SampledTokens(_message.Message):
    __slots__ = ("token_ids", "logprobs", "top_logprobs", "index", "prompt_logprobs", "prompt_top_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[_shoal_pb2.TopLogProbs]
    index: int
    prompt_logprobs: _containers.RepeatedScalarFieldContainer[float]
    prompt_top_logprobs: _containers.RepeatedCompositeFieldContainer[_shoal_pb2.TopLogProbs]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_logprobs: _Optional[_Iterable[_Union[_shoal_pb2.TopLogProbs, _Mapping]]] = ..., index: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[float]] = ..., prompt_top_logprobs: _Optional[_Iterable[_Union[_shoal_pb2.TopLogProbs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "matched_token_id", "received_payload_bytes", "kv_layer_tokens", "kv_bytes", "transfer_done_ms", "first_token_ms", "index", "prefill_ms")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_LAYER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_DONE_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    matched_token_id: int
    received_payload_bytes: int
    kv_layer_tokens: int
    kv_bytes: int
    transfer_done_ms: float
    first_token_ms: float
    index: int
    prefill_ms: float
    def __init__(self, finish_reason: _Optional[str] = ..., matched_token_id: _Optional[int] = ..., received_payload_bytes: _Optional[int] = ..., kv_layer_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., transfer_done_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., index: _Optional[int] = ..., prefill_ms: _Optional[float] = ...) -> None: ...

class Preempted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("reserved", "tokens", "finished", "preempted")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    tokens: SampledTokens
    finished: Finished
    preempted: Preempted
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., tokens: _Optional[_Union[SampledTokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., preempted: _Optional[_Union[Preempted, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "attempt_id", "prompt_ids", "num_prompt_tokens", "visibility", "cached_tokens", "plan_digest", "decode_address", "decode_worker_id", "decode_epoch", "priority", "tenant", "cache_salt", "background", "images")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    visibility: str
    cached_tokens: int
    plan_digest: str
    decode_address: str
    decode_worker_id: str
    decode_epoch: int
    priority: str
    tenant: str
    cache_salt: str
    background: bool
    images: _containers.RepeatedCompositeFieldContainer[PromptImage]
    def __init__(self, request_id: _Optional[str] = ..., attempt_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., visibility: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., plan_digest: _Optional[str] = ..., decode_address: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., decode_epoch: _Optional[int] = ..., priority: _Optional[str] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., background: bool = ..., images: _Optional[_Iterable[_Union[PromptImage, _Mapping]]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("sent_payload_bytes", "queue_ms", "compute_ms", "after_compute_ms", "cached_tokens")
    SENT_PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    AFTER_COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sent_payload_bytes: int
    queue_ms: float
    compute_ms: float
    after_compute_ms: float
    cached_tokens: int
    def __init__(self, sent_payload_bytes: _Optional[int] = ..., queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., after_compute_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("revision", "adapter", "num_layers", "hidden_size", "num_kv_heads", "head_dim", "dtype", "block_size", "rope", "max_entry_bytes", "max_entry_tokens")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    MAX_ENTRY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_ENTRY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    revision: str
    adapter: str
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    rope: str
    max_entry_bytes: int
    max_entry_tokens: int
    def __init__(self, revision: _Optional[str] = ..., adapter: _Optional[str] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., rope: _Optional[str] = ..., max_entry_bytes: _Optional[int] = ..., max_entry_tokens: _Optional[int] = ...) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("worker_id", "pool", "epoch", "address", "fingerprint", "allowed_visibilities", "max_boundary_tokens", "colocated")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_VISIBILITIES_FIELD_NUMBER: _ClassVar[int]
    MAX_BOUNDARY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool: str
    epoch: int
    address: str
    fingerprint: Fingerprint
    allowed_visibilities: _containers.RepeatedScalarFieldContainer[str]
    max_boundary_tokens: int
    colocated: bool
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., allowed_visibilities: _Optional[_Iterable[str]] = ..., max_boundary_tokens: _Optional[int] = ..., colocated: bool = ...) -> None: ...

class GetWorkRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkReport(_message.Message):
    __slots__ = ("load", "num_arrived_reqs", "prompts_by_size", "prompt_tokens", "answers_by_size", "answer_tokens", "num_steps", "step_s", "step_reqs", "step_tokens")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_ARRIVED_REQS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_BY_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_BY_SIZE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    STEP_REQS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    load: _shoal_pb2.WorkerLoad
    num_arrived_reqs: int
    prompts_by_size: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    answers_by_size: _containers.RepeatedScalarFieldContainer[int]
    answer_tokens: int
    num_steps: int
    step_s: float
    step_reqs: int
    step_tokens: int
    def __init__(self, load: _Optional[_Union[_shoal_pb2.WorkerLoad, _Mapping]] = ..., num_arrived_reqs: _Optional[int] = ..., prompts_by_size: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., answers_by_size: _Optional[_Iterable[int]] = ..., answer_tokens: _Optional[int] = ..., num_steps: _Optional[int] = ..., step_s: _Optional[float] = ..., step_reqs: _Optional[int] = ..., step_tokens: _Optional[int] = ...) -> None: ...
