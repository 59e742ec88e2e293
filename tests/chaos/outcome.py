"""What became of one request, as its caller saw it. Plain data."""

from dataclasses import dataclass, field

from tests.chaos.plan import Leave


@dataclass(slots=True)
class Heard:
    """What one of the n answers brought."""

    streamed: list[int] = field(default_factory=list)  # token ids of the chunks, joined
    logprobs: list[float] = field(default_factory=list)
    final: tuple[int, ...] | None = None  # token ids of the complete answer
    reason: str = ""


@dataclass(slots=True)
class Outcome:
    """`error` is the class of the error it ended with, "" when it ended well or its caller closed it."""

    index: int
    question: int
    leave: Leave | None
    started_s: float  # of the run's clock
    ended_s: float = 0.0
    closed: bool = False  # by its caller, before its end
    error: str = ""
    words: str = ""
    heard: dict[int, Heard] = field(default_factory=dict)  # by answer
    longest_gap_s: float = 0.0  # without any news, from the start on
    num_retries: int = 0
    num_notices: int = 0

    @property
    def whole(self) -> bool:
        """Whether at least one answer came to its end."""
        return any(heard.final is not None for heard in self.heard.values())
