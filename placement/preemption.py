"""Who gives its blocks up when a running request needs more than there are. Knows classes and arrival; knows no blocks, no clock.

The most senior request is of the highest class, and of these the one that arrived first; it never gives way, so whatever happens
somebody gets on to its end, and then the next one does. The least senior gives way first, and comes back by replaying its tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """A request that holds blocks."""

    key: str
    rank: int  # of its class, 0 for the lowest
    arrived_s: float  # when its client asked: one that was preempted before keeps its place

    @property
    def seniority(self) -> tuple[int, float, str]:
        """Sorts the most senior first."""
        return -self.rank, self.arrived_s, self.key


def choose_victim(holders: Iterable[Holder]) -> Holder:
    """The least senior; at least one is given."""
    return max(holders, key=lambda holder: holder.seniority)


def num_first_tokens(num_answer_tokens: int, num_replay_tokens: int, block_size: int) -> int:
    """Answer tokens that a preemptible request reserves room for: those replayed and one block (design §5.1), at most all."""
    return min(num_answer_tokens, num_replay_tokens + block_size)


def headroom_blocks(num_holders: int, num_layers: int) -> int:
    """Blocks that admission leaves free: each that runs may need one more in every layer before any has ended."""
    return num_holders * num_layers
