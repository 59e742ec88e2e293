"""Fields that both completion endpoints share, to the public request. Checks types; leaves most ranges to the service."""

from typing import Final

from shoal.pb.v1 import shoal_pb2
from shoal.router.http.errors import BadField, UnsupportedField
from shoal.router.http.fields import Fields, dump_field
from shoal.types import Priority
from shoal.visibility import Visibility

INT32_MAX: Final = (1 << 31) - 1
NUMBERS: Final = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
FLAGS: Final = ("ignore_eos", "include_stop_str_in_output")
EXTENSIONS: Final = ("visibility", "prefill_layers", "cache_salt", "structured_outputs", "priority", "service_tier")
SAMPLING: Final = (*NUMBERS, *FLAGS, "max_tokens", "top_k", "min_tokens", "stop", "stop_token_ids", "seed", "n", "logit_bias")
IGNORED: Final = (  # of OpenAI's: they name the caller or its account and change no answer
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
COMMON: Final = ("model", "stream", "stream_options", *SAMPLING, *EXTENSIONS, *IGNORED)
TIERS: Final = {"auto": "", "default": "", "scale": "", "flex": "low", "priority": "high"}  # OpenAI's, as classes
DEFAULT_TEMPERATURE: Final = 1.0  # OpenAI's


def read_sampling(fields: Fields) -> shoal_pb2.SamplingParams:
    """What is absent stays absent, but for the temperature, which OpenAI's clients expect to be 1."""
    sampling = shoal_pb2.SamplingParams(
        top_k=fields.integer("top_k", -1, INT32_MAX, bounded=False),
        max_tokens=fields.integer("max_tokens", 1, 1 << 53, bounded=False),
        min_tokens=fields.integer("min_tokens", 0, INT32_MAX, bounded=False),
        n=fields.integer("n", 1, INT32_MAX, bounded=False),
        seed=fields.integer("seed", 0, (1 << 64) - 1),
        stop=fields.texts("stop"),
        stop_token_ids=fields.ids("stop_token_ids"),
    )
    given = {name: fields.number(name) for name in NUMBERS} | {name: fields.flag(name) for name in FLAGS}
    for name, value in given.items():
        if value is not None:
            setattr(sampling, name, value)
    if not sampling.HasField("temperature"):
        sampling.temperature = DEFAULT_TEMPERATURE
    if sampling.top_k == -1:  # vLLM's word for all
        sampling.top_k = 0
    _read_logit_bias(fields, sampling)
    _read_structured_outputs(fields, sampling)
    return sampling


def read_visibility(fields: Fields) -> str | None:
    """`visibility` as in gRPC; `prefill_layers` gives K to it, or to `speed` when it stands alone."""
    text, layers = fields.text("visibility"), fields.integer("prefill_layers", 1, 1 << 16)
    if layers is None:
        return text
    if text is None:
        return f"speed:{layers}"
    kind, _, rest = text.partition(":")
    if kind in ("speed", "pop") and not rest[:1].isdigit():
        return ":".join(filter(None, (kind, str(layers), rest)))
    if kind not in ("speed", "pop") or Visibility.parse(text).prefill_layers != layers:
        raise BadField("prefill_layers", f"prefill_layers {layers} contradicts visibility {text!r}; leave one of them out")
    return text


def read_priority(fields: Fields) -> str:
    """`priority` by name, or as vLLM has it (0 is normal, less is higher); else what OpenAI's `service_tier` stands for."""
    tier = TIERS[fields.choice("service_tier", TIERS) or "auto"]
    if isinstance(fields.raw("priority"), str):
        return fields.choice("priority", tuple(Priority)) or tier
    number = fields.integer("priority", -(1 << 31), INT32_MAX, bounded=False)
    return tier if number is None else Priority.HIGH if number < 0 else Priority.LOW if number else Priority.NORMAL


def read_response_format(fields: Fields, sampling: shoal_pb2.SamplingParams) -> None:
    """OpenAI's `response_format`: text, json_object or json_schema."""
    form = fields.nested("response_format")
    if form is None:
        return
    match form.need(form.choice("type", ("text", "json_object", "json_schema")), "type"):
        case "json_object":
            _one_constraint(sampling, "response_format")
            sampling.json_object = True
        case "json_schema":
            _one_constraint(sampling, "response_format")
            holder = form.need(form.nested("json_schema"), "json_schema")
            schema = holder.need(holder.raw("schema"), "schema")
            sampling.json_schema = _schema_text(schema, holder.path("schema"))


def include_usage(fields: Fields) -> bool:
    """Whether a stream ends with its usage."""
    options = fields.nested("stream_options")
    if options is None:
        return False
    if not fields.flag("stream"):
        raise BadField("stream_options", "stream_options is for streams; set stream, or leave it out")
    options.check_known(("include_usage", "include_obfuscation", "continuous_usage_stats"))
    if options.flag("continuous_usage_stats"):
        raise UnsupportedField("stream_options", "stream_options.continuous_usage_stats is not offered; use include_usage")
    return bool(options.flag("include_usage"))


def _read_logit_bias(fields: Fields, sampling: shoal_pb2.SamplingParams) -> None:
    biases = fields.nested("logit_bias")
    for key in biases.names if biases is not None else ():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 1 << 32):
            raise BadField("logit_bias", f'logit_bias has the key {key!r}; keys are token ids, as in {{"42": -100}}')
        bias = biases.number(key) if biases is not None else None
        sampling.logit_bias[int(key)] = bias or 0.0


def _read_structured_outputs(fields: Fields, sampling: shoal_pb2.SamplingParams) -> None:
    """vLLM's `structured_outputs`: one of json, json_object, regex, grammar, choice."""
    form = fields.nested("structured_outputs")
    if form is None:
        return
    form.check_known(("json", "json_object", "regex", "grammar", "choice"))
    if len(form.names) != 1:
        fields.refuse("structured_outputs", "must have exactly one of json, json_object, regex, grammar, choice")
    if (schema := form.raw("json")) is not None:
        sampling.json_schema = _schema_text(schema, form.path("json"))
    elif form.flag("json_object"):
        sampling.json_object = True
    elif (regex := form.text("regex")) is not None:
        sampling.regex = regex
    elif (grammar := form.text("grammar")) is not None:
        sampling.grammar = grammar
    elif (choices := form.texts("choice")) is not None:
        sampling.choice.choices.extend(choices)
        sampling.choice.SetInParent()


def _schema_text(schema: object, where: str) -> str:
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, dict | bool):
        raise BadField(where, f"{where} must be a JSON schema: an object")
    return dump_field(schema, where)


def _one_constraint(sampling: shoal_pb2.SamplingParams, name: str) -> None:
    if sampling.WhichOneof("constraint") is not None:
        raise BadField(name, f"{name} and structured_outputs both shape the answer; give one of them")
