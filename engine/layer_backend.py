"""Who computes the layers of a stage: the interface. Knows shapes; what a kernel does is its own module's business."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.engine.kv_pool import KvPool
from shoal.engine.rope import Frequencies, Rotations
from shoal.engine.segment import Segment
from shoal.engine.stages import RowGroup, Stage
from shoal.engine.weights import KvWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class StageRows:
    """Some rows of a stage on their way in."""

    group: RowGroup  # where their K and V go
    x: torch.Tensor  # [n, h]
    rotations: Rotations


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage of one step, ready to run."""

    stage: Stage
    full: StageRows | None
    kv_only: StageRows | None
    pool: KvPool


class StageRun(Protocol):
    """One stage being run. Iterating yields each layer's index when K and V of all rows are in the pool, before attention."""

    x: torch.Tensor | None  # [n, h] hidden states of the full rows behind the last layer run

    def layers(self, is_heard: Callable[[int], bool]) -> Iterator[int]:
        """Run the stage. `is_heard` is asked of each layer once, in order, perhaps long before it is run; those of which it says
        no pass without a yield, several in one go where that is faster."""
        ...


@dataclass(frozen=True, slots=True)
class Ends:
    """What a whole step needs beside the layers."""

    frequencies: Frequencies  # of the rotary embedding
    embedding: torch.Tensor  # [vocab, h]
    norm: torch.Tensor  # [h], the final one
    head: torch.Tensor  # [vocab, h]


class WholeSteps(Protocol):
    """Runs some steps from token ids to logits in one go."""

    def run(self, segments: Sequence[Segment], pool: KvPool) -> torch.Tensor | None:
        """Logits [rows, vocab] float32, valid until the next call; None for a step that has to be run stage by stage."""
        ...


class LayerBackend(Protocol):
    """Holds layers in a form of its own and runs stages of them."""

    @property
    def rotation_dtype(self) -> torch.dtype:
        """The type in which it wants cosines and sines."""
        ...

    def hold(self, layers: Mapping[int, LayerWeights], kv_only: Mapping[int, KvWeights]) -> None:
        """Take these weights; the ones given may go if they are kept in another form."""
        ...

    def run(self, work: StageWork) -> StageRun:
        """Prepare a stage. Raises InternalError for a layer that is not held."""
        ...

    def whole_steps(self, ends: Ends) -> WholeSteps | None:
        """A way to run whole steps, where every layer is held; None where stages are all there is."""
        ...

    def score(self, x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head: hidden x [n, h] → [n, vocab] float32, without the soft cap."""
        ...
