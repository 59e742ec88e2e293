"""What sampling asks of a constraint on the answer: which tokens may come next, and to be told which one did."""

from collections.abc import Callable, Collection
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.types import Constraint


class TokenConstraint(Protocol):
    """One answer's constraint, at the point the answer has reached. Two threads use it, never at the same time."""

    @property
    def failure(self) -> str | None:
        """In words, once the constraint can be followed no further; what was drawn since then means nothing."""

    @property
    def is_complete(self) -> bool:
        """The answer is whole and nothing may follow, though no stop id has come."""

    def fill_mask(self, bitmask: NDArray[np.int32], row: int) -> None:
        """Write row `row` of `bitmask` [rows, ⌈vocab / 32⌉]: bit t % 32 of word t // 32 is 1 where token t may come next.

        At least one token is allowed: EOS where nothing else is, any after a failure. Called in the step thread before each draw.
        """

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token, drawn or replayed. Called once for each, in order, on the event loop."""

    def catch_up(self) -> None:
        """Look at what was accepted, as `fill_mask` would. May take long: for what is replayed, before the first draw."""


ConstraintMaker: TypeAlias = Callable[[Constraint, Collection[int]], TokenConstraint]
"""A fresh constraint for one answer, which any of the given stop ids ends. Raises InvalidRequest when it cannot be compiled."""
