"""Which windows a step trains on: a function of data, options and the step's number alone. Knows token ids, no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shoal.errors import InvalidConfig
from shoal.quality.tune.batch import Span, Window
from shoal.quality.tune.options import TuneOptions

_BOS_SHARE: Final = 0.5  # of windows over plain text that begin with the BoS token
_MAX_START: Final = 48  # the first span of a window begins no later, or one span later where spans are longer


@dataclass(frozen=True, slots=True)
class TrainingTokens:
    """Plain text as one row of tokens, and prompts with their responses. Raises InvalidConfig when there is nothing to learn."""

    text: npt.NDArray[np.int32]
    given: tuple[Window, ...]
    bos_token_id: int | None

    def num_items(self, options: TuneOptions) -> int:
        return len(self.text) // options.sequence_tokens + len(self.given)

    def check(self, options: TuneOptions) -> None:
        if not self.num_items(options):
            raise InvalidConfig(
                f"the data has {len(self.text)} tokens of text, less than one window of {options.sequence_tokens}, and no "
                f"prompt with a response; give more text, or lower sequence_tokens"
            )


class WindowSource:
    """Deals windows out: every one once an epoch, in an order of its own each time, a share to every process."""

    def __init__(self, tokens: TrainingTokens, options: TuneOptions, *, rank: int = 0, num_processes: int = 1) -> None:
        tokens.check(options)
        self._tokens, self._options = tokens, options
        self._rank, self._num_processes = rank, num_processes
        self._num_texts = len(tokens.text) // options.sequence_tokens
        self._num_items = tokens.num_items(options)
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    @property
    def num_steps(self) -> int:
        """How many steps `options.tokens` make, on average over the data."""
        num_tokens = self._num_texts * self._options.sequence_tokens + sum(len(window.ids) for window in self._tokens.given)
        a_step = num_tokens / self._num_items * self._options.batch_sequences * self._num_processes
        return max(1, round(self._options.tokens / a_step))

    def step(self, number: int) -> list[Window]:
        """The windows of this process in a step."""
        count = self._options.batch_sequences
        first = (number * self._num_processes + self._rank) * count
        length = int(np.random.default_rng((self._options.seed, 1, number)).choice(self._options.response_tokens))
        return [self._window(index, length) for index in range(first, first + count)]

    def candidates(self) -> npt.NDArray[np.int64] | None:
        """The most frequent tokens of the data, ascending, as many as the options say; None for the whole vocabulary."""
        if not self._options.candidates:
            return None
        ids = np.concatenate([self._tokens.text, *(np.array(window.ids, np.int32) for window in self._tokens.given)])
        counts = np.bincount(ids)
        kept = np.argsort(-counts, kind="stable")[: self._options.candidates]
        return np.sort(kept[counts[kept] > 0]).astype(np.int64)

    def _window(self, index: int, length: int) -> Window:
        epoch, place = divmod(index, self._num_items)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._options.seed, 2, epoch)).permutation(self._num_items))
        item = int(self._order[1][place])
        if item >= self._num_texts:
            return self._tokens.given[item - self._num_texts]
        size, rng = self._options.sequence_tokens, np.random.default_rng((self._options.seed, 3, index))
        ids = self._tokens.text[item * size : (item + 1) * size].tolist()
        if self._tokens.bos_token_id is not None and rng.random() < _BOS_SHARE:
            ids[0] = self._tokens.bos_token_id
        least = max(1, self._options.visibility.anchor_tokens)
        start = min(size - length, least + int(rng.integers(0, min(length, _MAX_START))))
        start = size - (size - start) // length * length  # whole spans, up to the window's end
        more = (self._options.visibility.boundary_tokens or 1) - 1  # prompt tokens at full depth before the last one, as served
        spans = ((max(least, begin - more), begin) for begin in range(start, size, length))
        return Window(tuple(ids), tuple(Span(bound, begin + length, begin - bound) for bound, begin in spans))


def excerpts(
    texts: Sequence[Sequence[int]], prompt_tokens: int, response_tokens: int, count: int, seed: int, *, boundary: int = 1
) -> list[Window]:
    """`count` prompts with their continuations, from different texts where there are enough. Raises InvalidConfig for none."""
    length, rng = prompt_tokens + response_tokens, np.random.default_rng((seed, 4))
    long = [ids for ids in texts if len(ids) >= length]
    if not long:
        raise InvalidConfig(f"no held-out text has {length} tokens ({prompt_tokens} of prompt, {response_tokens} after it)")
    found, order = [], rng.permutation(len(long))
    for index in range(count):
        ids = long[int(order[index % len(long)])]
        start = int(rng.integers(0, len(ids) - length + 1))
        found.append(Window(tuple(ids[start : start + length]), (Span(prompt_tokens - boundary, length, boundary - 1),)))
    return found
