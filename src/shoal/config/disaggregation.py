"""When a decode worker prefills a prompt itself: two thresholds. Knows no request; placement/disaggregate.py applies them."""

from dataclasses import dataclass
from typing import Final

from shoal.errors import InvalidConfig

LOCAL_PREFILL_TOKENS: Final = 128  # where a prompt adds a decode step's time to a step: docs/operations.md
LOCAL_CACHED_SHARE: Final = 0.75


@dataclass(frozen=True, slots=True)
class DisaggregationRule:
    """Raises InvalidConfig for values that mean nothing. As it stands by itself, decode prefills nothing."""

    local_prefill_tokens: int = 0  # fewer uncached prefill tokens than this run on the decode worker; 0: none do
    local_cached_share: float = 1.0  # so do those of a prompt of which decode holds at least this share; 1: none do

    def __post_init__(self) -> None:
        if self.local_prefill_tokens < 0:
            raise InvalidConfig(f"local_prefill_tokens must be 0 (never) or more, not {self.local_prefill_tokens}")
        if not 0 < self.local_cached_share <= 1:
            raise InvalidConfig(f"local_cached_share must lie above 0 and be at most 1 (never), not {self.local_cached_share}")


NEVER_LOCAL: Final = DisaggregationRule()
