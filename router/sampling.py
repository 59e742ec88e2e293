"""Sampling parameters from the public message: defaults filled in, ranges checked. Knows limits; knows no tokenizer."""

import json
from typing import Final

from shoal.errors import InvalidRequest, Unsupported
from shoal.pb.v1 import shoal_pb2
from shoal.router.validation import RequestLimits, check_token_ids
from shoal.types import Constraint, ConstraintKind, SamplingParams
from shoal.visibility import Visibility, VisibilityKind

MAX_CHILDREN: Final = 128  # n
MAX_LOGPROBS: Final = 20  # beside a token
SEED_BITS: Final = 64


def check_sampling(
    message: shoal_pb2.SamplingParams, limits: RequestLimits, num_prompt_tokens: int, default_seed: int
) -> SamplingParams:
    """The sampling parameters with every default filled in. Raises InvalidRequest that names the field and its range."""
    room = limits.max_context - num_prompt_tokens
    max_tokens = message.max_tokens if message.HasField("max_tokens") else room
    if max_tokens > room:
        raise InvalidRequest(
            f"prompt ({num_prompt_tokens} tokens) + max_tokens ({max_tokens}) exceed the context limit of {limits.max_context}; "
            f"set max_tokens to at most {room} or leave it out"
        )
    check_token_ids(message.stop_token_ids, limits.vocab_size, "stop_token_ids")
    logit_bias = tuple(sorted(message.logit_bias.items()))
    check_token_ids([token_id for token_id, _ in logit_bias], limits.vocab_size, "logit_bias: id")
    stop_token_ids = (*message.stop_token_ids, *(() if message.ignore_eos else limits.eos_token_ids))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=message.temperature if message.HasField("temperature") else 0.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k if message.HasField("top_k") else 0,
        seed=message.seed if message.HasField("seed") else default_seed,
        stop=tuple(message.stop),
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        ignore_eos=message.ignore_eos,
        num_logprobs=message.logprobs if message.HasField("logprobs") else None,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=logit_bias,
        min_tokens=message.min_tokens,
        include_stop_str_in_output=message.include_stop_str_in_output,
        constraint=read_constraint(message),
    )


def check_num_children(message: shoal_pb2.SamplingParams) -> int:
    """n. Raises InvalidRequest that names its range."""
    num_children = message.n if message.HasField("n") else 1
    if not 1 <= num_children <= MAX_CHILDREN:
        raise InvalidRequest(f"n must lie in 1…{MAX_CHILDREN}, not {num_children}")
    return num_children


def check_prompt_logprobs(message: shoal_pb2.SamplingParams, visibility: Visibility) -> int | None:
    """How many beside each prompt token; None: not asked for. Raises Unsupported where prompt tokens have no such thing."""
    if not message.HasField("prompt_logprobs"):
        return None
    if not 0 <= message.prompt_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"prompt_logprobs must lie in 0…{MAX_LOGPROBS}, not {message.prompt_logprobs}")
    if visibility.kind is not VisibilityKind.FULL:
        raise Unsupported(
            f"prompt_logprobs need visibility full: under '{visibility.policy}' prompt tokens do not run through every layer and "
            "predict nothing. Use visibility full, or Score, which runs a continuation as decode tokens"
        )
    return message.prompt_logprobs


def read_constraint(message: shoal_pb2.SamplingParams) -> Constraint | None:
    """What the answer must match, in one of the forms that decode knows."""
    match kind := message.WhichOneof("constraint"):
        case "json_schema" | "regex" | "grammar":
            return Constraint(ConstraintKind(kind), getattr(message, kind))
        case "json_object" if message.json_object:
            return Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object"}')
        case "choice":
            return Constraint(ConstraintKind.CHOICES, json.dumps(list(message.choice.choices), ensure_ascii=False))
    return None
