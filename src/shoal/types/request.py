"""What a request asks for and how it ends. Knows no transport."""

import math
from dataclasses import dataclass
from enum import StrEnum

from shoal.errors import InvalidRequest


class FinishReason(StrEnum):
    """The names vLLM and SGLang use."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"


class ConstraintKind(StrEnum):
    """What an answer may be held to. Plain JSON is the schema `{"type": "object"}`; choices are a JSON array of strings."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICES = "choices_json"


@dataclass(frozen=True, slots=True)
class Constraint:
    """Text that must be matched by the whole answer; compiled by the router to check it, by decode to mask with it."""

    kind: ConstraintKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How decode picks tokens. temperature 0 is greedy. Raises InvalidRequest that names the field."""

    max_tokens: int  # already resolved: absent on the wire means "to the context limit"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None = none; 0 = the sampled token's only; n = the top n beside it
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # over prompt and answer; 1 = off
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its score)
    min_tokens: int = 0  # stop_token_ids are masked before so many
    include_stop_str_in_output: bool = False
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise InvalidRequest(f"temperature must be a finite number >= 0, not {self.temperature}")
        if not (0 < self.top_p <= 1):  # also refuses NaN
            raise InvalidRequest(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be 0 (all) or more, not {self.top_k}")
        if not (0 <= self.seed < 1 << 64):
            raise InvalidRequest(f"seed must fit 64 bits without sign, not {self.seed}")
        if self.num_logprobs is not None and not (0 <= self.num_logprobs <= 20):
            raise InvalidRequest(f"logprobs must lie in 0…20, not {self.num_logprobs}")
        if "" in self.stop:
            raise InvalidRequest("stop strings must not be empty")
        if not (0 <= self.min_p <= 1):
            raise InvalidRequest(f"min_p must lie in [0, 1], not {self.min_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise InvalidRequest(f"repetition_penalty must be a finite number > 0, not {self.repetition_penalty}")
        if not (-2 <= self.presence_penalty <= 2):
            raise InvalidRequest(f"presence_penalty must lie in [-2, 2], not {self.presence_penalty}")
        if not (-2 <= self.frequency_penalty <= 2):
            raise InvalidRequest(f"frequency_penalty must lie in [-2, 2], not {self.frequency_penalty}")
        if not (0 <= self.min_tokens <= self.max_tokens):
            raise InvalidRequest(f"min_tokens must lie in 0…max_tokens ({self.max_tokens}), not {self.min_tokens}")
        if self.logit_bias:
            if any(not math.isfinite(bias) or abs(bias) > 100 for _, bias in self.logit_bias):
                raise InvalidRequest("logit_bias values must lie in [-100, 100]")
            if len({token_id for token_id, _ in self.logit_bias}) != len(self.logit_bias):
                raise InvalidRequest("logit_bias names a token id twice")

    @property
    def has_penalties(self) -> bool:
        """Whether scores depend on the tokens that came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The sampled token's log-probability and the top ones beside it, before temperature and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first
