"""Which spans a window of plain text is cut into, with and without a boundary."""

import numpy as np
import pytest

from shoal.quality.tune.options import TuneOptions
from shoal.quality.tune.windows import TrainingTokens, WindowSource, excerpts
from shoal.visibility import Visibility

TOKENS = TrainingTokens(np.arange(640, dtype=np.int32), (), None)


def spans(visibility: str, step: int) -> list[tuple[int, int, int]]:
    options = TuneOptions(Visibility.parse(visibility), sequence_tokens=64, response_tokens=(4, 10), batch_sequences=2)
    windows = WindowSource(TOKENS, options).step(step)
    return [(span.start, span.stop, span.num_silent) for window in windows for span in window.spans]


@pytest.mark.parametrize("step", range(4))
def test_a_boundary_adds_silent_tokens_and_changes_nothing_else(step: int) -> None:
    plain, bound = spans("speed:2:anchors=2", step), spans("speed:2:anchors=2:boundary=5", step)
    assert bound == [(max(2, start - 4), stop, start - max(2, start - 4)) for start, stop, _ in plain]
    assert all(silent == 0 for _, _, silent in plain) and {silent for _, _, silent in bound} >= {4}


def test_held_out_excerpts_begin_at_the_boundary() -> None:
    (window,) = excerpts([list(range(40))], 20, 8, 1, 0, boundary=6)
    (span,) = window.spans
    assert (span.start, span.stop, span.num_silent) == (14, 28, 5)
