from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenizedInput(_message.Message):
    __slots__ = ("original_text", "input_ids")
    ORIGINAL_TEXT_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    original_text: str
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, original_text: _Optional[str] = ..., input_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "image")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: Image
    def __init__(self, text: _Optional[str] = ..., image: _Optional[_Union[Image, _Mapping]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls_json", "tool_call_id", "name", "content_parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_PARTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls_json: str
    tool_call_id: str
    name: str
    content_parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls_json: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ..., content_parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages", "tools_json", "tool_choice_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: str
    tool_choice_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ..., tool_choice_json: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "logprobs", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "include_stop_str_in_output", "n", "prompt_logprobs", "json_schema", "regex", "grammar", "json_object", "choice")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    seed: int
    logprobs: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    include_stop_str_in_output: bool
    n: int
    prompt_logprobs: int
    json_schema: str
    regex: str
    grammar: str
    json_object: bool
    choice: ChoiceConstraint
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., include_stop_str_in_output: bool = ..., n: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., json_object: bool = ..., choice: _Optional[_Union[ChoiceConstraint, _Mapping]] = ...) -> None: ...

class ChoiceConstraint(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "tokenized", "text", "chat", "sampling_params", "stream", "visibility", "model", "priority", "cache_salt", "images")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokenized: TokenizedInput
    text: str
    chat: ChatInput
    sampling_params: SamplingParams
    stream: bool
    visibility: str
    model: str
    priority: str
    cache_salt: str
    images: _containers.RepeatedCompositeFieldContainer[Image]
    def __init__(self, request_id: _Optional[str] = ..., tokenized: _Optional[_Union[TokenizedInput, _Mapping]] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., stream: bool = ..., visibility: _Optional[str] = ..., model: _Optional[str] = ..., priority: _Optional[str] = ..., cache_salt: _Optional[str] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("request_id", "tokenized", "text", "continuation_tokenized", "continuation_text", "visibility", "model", "logprobs", "priority", "cache_salt", "images")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_TEXT_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokenized: TokenizedInput
    text: str
    continuation_tokenized: TokenizedInput
    continuation_text: str
    visibility: str
    model: str
    logprobs: int
    priority: str
    cache_salt: str
    images: _containers.RepeatedCompositeFieldContainer[Image]
    def __init__(self, request_id: _Optional[str] = ..., tokenized: _Optional[_Union[TokenizedInput, _Mapping]] = ..., text: _Optional[str] = ..., continuation_tokenized: _Optional[_Union[TokenizedInput, _Mapping]] = ..., continuation_text: _Optional[str] = ..., visibility: _Optional[str] = ..., model: _Optional[str] = ..., logprobs: _Optional[int] = ..., priority: _Optional[str] = ..., cache_salt: _Optional[str] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("request_id", "logprobs", "total_logprob", "is_greedy", "prompt_tokens", "visibility", "transfer", "cached_tokens", "prefill_cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    IS_GREEDY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    logprobs: OutputLogProbs
    total_logprob: float
    is_greedy: bool
    prompt_tokens: int
    visibility: str
    transfer: TransferStats
    cached_tokens: int
    prefill_cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., logprobs: _Optional[_Union[OutputLogProbs, _Mapping]] = ..., total_logprob: _Optional[float] = ..., is_greedy: bool = ..., prompt_tokens: _Optional[int] = ..., visibility: _Optional[str] = ..., transfer: _Optional[_Union[TransferStats, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., prefill_cached_tokens: _Optional[int] = ...) -> None: ...

class TopLogProbs(_message.Message):
    __slots__ = ("values", "token_ids")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[float]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class OutputLogProbs(_message.Message):
    __slots__ = ("token_logprobs", "token_ids", "top_logprobs")
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_logprobs: _containers.RepeatedScalarFieldContainer[float]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogProbs]
    def __init__(self, token_logprobs: _Optional[_Iterable[float]] = ..., token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogProbs, _Mapping]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "chunk", "complete")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chunk: GenerateStreamChunk
    complete: GenerateComplete
    def __init__(self, request_id: _Optional[str] = ..., chunk: _Optional[_Union[GenerateStreamChunk, _Mapping]] = ..., complete: _Optional[_Union[GenerateComplete, _Mapping]] = ...) -> None: ...

class GenerateStreamChunk(_message.Message):
    __slots__ = ("token_ids", "text", "prompt_tokens", "completion_tokens", "cached_tokens", "index", "output_logprobs", "input_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    index: int
    output_logprobs: OutputLogProbs
    input_logprobs: OutputLogProbs
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., index: _Optional[int] = ..., output_logprobs: _Optional[_Union[OutputLogProbs, _Mapping]] = ..., input_logprobs: _Optional[_Union[OutputLogProbs, _Mapping]] = ...) -> None: ...

class GenerateComplete(_message.Message):
    __slots__ = ("output_ids", "text", "finish_reason", "matched_token_id", "matched_stop_str", "prompt_tokens", "completion_tokens", "cached_tokens", "index", "output_logprobs", "visibility", "transfer", "timings", "decode_kv", "seed", "num_retries", "notices", "input_logprobs", "prefill_cached_tokens", "num_preemptions", "requested_visibility", "visibility_reason", "image_tokens")
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DECODE_KV_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRIES_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    INPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_REASON_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish_reason: str
    matched_token_id: int
    matched_stop_str: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    index: int
    output_logprobs: OutputLogProbs
    visibility: str
    transfer: TransferStats
    timings: Timings
    decode_kv: KvStats
    seed: int
    num_retries: int
    notices: _containers.RepeatedScalarFieldContainer[str]
    input_logprobs: OutputLogProbs
    prefill_cached_tokens: int
    num_preemptions: int
    requested_visibility: str
    visibility_reason: str
    image_tokens: int
    def __init__(self, output_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[str] = ..., matched_token_id: _Optional[int] = ..., matched_stop_str: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., index: _Optional[int] = ..., output_logprobs: _Optional[_Union[OutputLogProbs, _Mapping]] = ..., visibility: _Optional[str] = ..., transfer: _Optional[_Union[TransferStats, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., decode_kv: _Optional[_Union[KvStats, _Mapping]] = ..., seed: _Optional[int] = ..., num_retries: _Optional[int] = ..., notices: _Optional[_Iterable[str]] = ..., input_logprobs: _Optional[_Union[OutputLogProbs, _Mapping]] = ..., prefill_cached_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., requested_visibility: _Optional[str] = ..., visibility_reason: _Optional[str] = ..., image_tokens: _Optional[int] = ...) -> None: ...

class TransferStats(_message.Message):
    __slots__ = ("payload_bytes", "plan_bytes", "full_depth_bytes", "num_entries", "prefill_worker", "decode_worker", "prefill_at", "prefill_reason")
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLAN_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_DEPTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_AT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_REASON_FIELD_NUMBER: _ClassVar[int]
    payload_bytes: int
    plan_bytes: int
    full_depth_bytes: int
    num_entries: int
    prefill_worker: str
    decode_worker: str
    prefill_at: str
    prefill_reason: str
    def __init__(self, payload_bytes: _Optional[int] = ..., plan_bytes: _Optional[int] = ..., full_depth_bytes: _Optional[int] = ..., num_entries: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., prefill_at: _Optional[str] = ..., prefill_reason: _Optional[str] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("tokenize_ms", "reserve_ms", "prefill_ms", "transfer_ms", "first_step_ms", "ttft_ms", "tpot_ms", "total_ms")
    TOKENIZE_MS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    tokenize_ms: float
    reserve_ms: float
    prefill_ms: float
    transfer_ms: float
    first_step_ms: float
    ttft_ms: float
    tpot_ms: float
    total_ms: float
    def __init__(self, tokenize_ms: _Optional[float] = ..., reserve_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., first_step_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class KvStats(_message.Message):
    __slots__ = ("layer_tokens", "bytes")
    LAYER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    layer_tokens: int
    bytes: int
    def __init__(self, layer_tokens: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "add_special_tokens", "model", "images")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: ChatInput
    add_special_tokens: bool
    model: str
    images: _containers.RepeatedCompositeFieldContainer[Image]
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., add_special_tokens: bool = ..., model: _Optional[str] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_context_length")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_context_length: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_context_length: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens", "model")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    model: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ..., model: _Optional[str] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model_path", "served_model_name", "model_type", "max_context_length", "vocab_size", "num_layers", "eos_token_ids", "bos_token_id", "allowed_visibilities", "max_boundary_tokens", "revision", "dtype", "license", "adapter", "supports_vision", "image_placeholder", "image_token_id")
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_VISIBILITIES_FIELD_NUMBER: _ClassVar[int]
    MAX_BOUNDARY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LICENSE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_VISION_FIELD_NUMBER: _ClassVar[int]
    IMAGE_PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    served_model_name: str
    model_type: str
    max_context_length: int
    vocab_size: int
    num_layers: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    allowed_visibilities: _containers.RepeatedScalarFieldContainer[str]
    max_boundary_tokens: int
    revision: str
    dtype: str
    license: str
    adapter: str
    supports_vision: bool
    image_placeholder: str
    image_token_id: int
    def __init__(self, model_path: _Optional[str] = ..., served_model_name: _Optional[str] = ..., model_type: _Optional[str] = ..., max_context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., allowed_visibilities: _Optional[_Iterable[str]] = ..., max_boundary_tokens: _Optional[int] = ..., revision: _Optional[str] = ..., dtype: _Optional[str] = ..., license: _Optional[str] = ..., adapter: _Optional[str] = ..., supports_vision: bool = ..., image_placeholder: _Optional[str] = ..., image_token_id: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "uptime_seconds", "active_requests", "workers", "quality")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_seconds: float
    active_requests: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    quality: _containers.RepeatedCompositeFieldContainer[VisibilityQuality]
    def __init__(self, version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., active_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., quality: _Optional[_Iterable[_Union[VisibilityQuality, _Mapping]]] = ...) -> None: ...

class VisibilityQuality(_message.Message):
    __slots__ = ("visibility", "state", "reason", "num_samples", "num_tokens", "agreement", "kl_nats", "num_replaced_requests")
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    KL_NATS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLACED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    visibility: str
    state: str
    reason: str
    num_samples: int
    num_tokens: int
    agreement: float
    kl_nats: float
    num_replaced_requests: int
    def __init__(self, visibility: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., num_samples: _Optional[int] = ..., num_tokens: _Optional[int] = ..., agreement: _Optional[float] = ..., kl_nats: _Optional[float] = ..., num_replaced_requests: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "pool", "address", "state", "epoch", "colocated")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool: str
    address: str
    state: str
    epoch: int
    colocated: bool
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., colocated: bool = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("loads",)
    LOADS_FIELD_NUMBER: _ClassVar[int]
    loads: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    def __init__(self, loads: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("worker_id", "pool", "num_running_reqs", "num_waiting_reqs", "num_used_blocks", "num_total_blocks", "num_reservations", "num_transfers_in_flight", "outstanding_token_layers", "num_staging_in_use", "num_staging_quarantined", "resident_bytes", "num_layers_held", "weight_bytes_read", "classes", "max_reservations", "mean_hold_s", "token_layers_per_s", "num_cached_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGING_IN_USE_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGING_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_HELD_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    MAX_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    MEAN_HOLD_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LAYERS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool: str
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_blocks: int
    num_total_blocks: int
    num_reservations: int
    num_transfers_in_flight: int
    outstanding_token_layers: int
    num_staging_in_use: int
    num_staging_quarantined: int
    resident_bytes: int
    num_layers_held: int
    weight_bytes_read: int
    classes: _containers.RepeatedCompositeFieldContainer[ClassLoad]
    max_reservations: int
    mean_hold_s: float
    token_layers_per_s: float
    num_cached_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., num_running_reqs: _Optional[int] = ..., num_waiting_reqs: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_reservations: _Optional[int] = ..., num_transfers_in_flight: _Optional[int] = ..., outstanding_token_layers: _Optional[int] = ..., num_staging_in_use: _Optional[int] = ..., num_staging_quarantined: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., num_layers_held: _Optional[int] = ..., weight_bytes_read: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[ClassLoad, _Mapping]]] = ..., max_reservations: _Optional[int] = ..., mean_hold_s: _Optional[float] = ..., token_layers_per_s: _Optional[float] = ..., num_cached_blocks: _Optional[int] = ...) -> None: ...

class ClassLoad(_message.Message):
    __slots__ = ("priority", "num_waiting_reqs", "num_waiting_blocks", "outstanding_token_layers")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    priority: str
    num_waiting_reqs: int
    num_waiting_blocks: int
    outstanding_token_layers: int
    def __init__(self, priority: _Optional[str] = ..., num_waiting_reqs: _Optional[int] = ..., num_waiting_blocks: _Optional[int] = ..., outstanding_token_layers: _Optional[int] = ...) -> None: ...
