"""What sampling asks of a constraint on the answer: which tokens may come next, and to be told which one did."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.types import Constraint


class TokenConstraint(Protocol):
    """One answer's constraint, at the point the answer has reached. Two threads use it, never at the same time."""

    def fill_mask(self, bitmask: NDArray[np.int32], row: int) -> None:
        """Write row `row` of `bitmask` [rows, ⌈vocab / 32⌉]: bit t % 32 of word t // 32 is 1 where token t may come next.

        At least one token must be allowed: EOS where nothing else is. Called in the step thread before each draw.
        """

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token, drawn or replayed. Called once for each, in order."""


ConstraintMaker: TypeAlias = Callable[[Constraint], TokenConstraint]
"""A fresh constraint for one answer. Raises InvalidRequest when it cannot be compiled."""
