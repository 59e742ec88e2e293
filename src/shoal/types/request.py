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
        if any(not text for text in self.stop):
            raise InvalidRequest("stop strings must not be empty")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The sampled token's log-probability and the top ones beside it, before temperature and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first
