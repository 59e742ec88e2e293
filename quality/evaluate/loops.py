"""Answers that have fallen into repetition. Knows token ids."""

from collections.abc import Sequence
from typing import Final

MIN_LOOP_TOKENS: Final = 32  # an answer's last tokens
_MIN_ROUNDS: Final = 3


def ends_in_loop(ids: Sequence[int], num_tokens: int = MIN_LOOP_TOKENS) -> bool:
    """Whether the last `num_tokens` tokens are one run of at most a third of them, again and again."""
    tail = list(ids[-num_tokens:])
    if len(tail) < num_tokens:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, num_tokens // _MIN_ROUNDS + 1))


def distinct_share(ids: Sequence[int], size: int = 4) -> float:
    """Distinct runs of `size` tokens over all of them; 1 says that nothing comes twice."""
    runs = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0
