"""What a workload asks for, in the few numbers that bounds need. Knows requests; knows no cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.errors import InvalidConfig
from shoal.simulator.workload.requests import SimRequest

_SAMPLE = 400  # prompts that bounds look at


@dataclass(frozen=True, slots=True)
class Demand:
    """A workload that is simulated again and again."""

    requests: tuple[SimRequest, ...]
    rate: float  # requests per second
    mean_prompt: float
    mean_output: float

    @classmethod
    def of(cls, requests: Sequence[SimRequest]) -> "Demand":
        """Raises InvalidConfig for fewer than two requests, or when all arrive at once."""
        if len(requests) < 2 or requests[-1].arrival_s <= requests[0].arrival_s:
            raise InvalidConfig("a plan needs a workload of at least two requests at different times")
        count = len(requests)
        span = (requests[-1].arrival_s - requests[0].arrival_s) * count / (count - 1)
        prompts = sum(request.num_prompt_tokens for request in requests) / count
        return cls(tuple(requests), count / span, prompts, sum(request.num_output_tokens for request in requests) / count)

    def prompt_quantile(self, quantile: float) -> int:
        """The prompt length that a share 1 − quantile of the requests reach or exceed."""
        ordered = sorted(request.num_prompt_tokens for request in self.requests)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]

    @property
    def sample(self) -> tuple[SimRequest, ...]:
        """Evenly spaced requests, for means over lengths."""
        step = max(1, len(self.requests) // _SAMPLE)
        return self.requests[::step]

    def with_prompts(self, factor: float, longest: int) -> "Demand":
        """The same requests with prompts `factor` times as long, at most `longest` tokens."""
        changed = [
            replace(request, num_prompt_tokens=max(1, min(longest, round(request.num_prompt_tokens * factor))))
            for request in self.requests
        ]
        return Demand.of(changed)
