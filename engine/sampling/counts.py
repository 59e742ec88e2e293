"""What penalties look at: which tokens a request has seen, and how often its answer used each. Knows ids and counts only."""

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Distinct ids of prompt and answer, and how often each occurs in the answer (0: in the prompt only).

    Made again from prompt and replayed tokens it is the same, so a resumed request is penalised as if it had never stopped.
    """

    def __init__(self, prompt_ids: Sequence[int], answer_ids: Iterable[int] = ()) -> None:
        self._ids: NDArray[np.int64] = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self._num = len(self._ids)
        self._slots = {token_id: slot for slot, token_id in enumerate(self._ids.tolist())}
        for token_id in answer_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """The answer goes on with this token."""
        slot = self._slots.setdefault(token_id, self._num)
        if slot == self._num:
            if self._num == len(self._ids):
                more = max(64, self._num)
                self._ids = np.concatenate([self._ids, np.zeros(more, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(more, dtype=np.int64)])
            self._ids[slot] = token_id
            self._num += 1
        self._counts[slot] += 1

    def copy(self) -> Self:
        """The same state, free to go another way: one prompt, several answers."""
        twin = type(self)(())
        twin._ids, twin._counts, twin._num = self._ids.copy(), self._counts.copy(), self._num
        twin._slots = dict(self._slots)
        return twin

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._num]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of `ids` occurs in the answer."""
        return self._counts[: self._num]
