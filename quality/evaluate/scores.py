"""Perplexity of continuations, and divergence from full depth, of any number of subjects on the same examples."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from shoal.errors import InvalidConfig
from shoal.quality.evaluate.trunk import Trunk
from shoal.quality.torch_model import IGNORED, DecoderLayer, Example, TorchDecoder, make_batch
from shoal.visibility import Visibility, VisibilityKind

Progress = Callable[[str, int, int], None]  # what, done, of how many
_RESAMPLES: Final = 1000


@dataclass(frozen=True)
class Subject:
    """Something to be scored: a model's weights under a visibility, by the name it has in tables."""

    name: str
    model: TorchDecoder
    visibility: Visibility  # resolved
    prefill_layers: tuple[DecoderLayer, ...] | None = None  # other modules for prefill tokens


@dataclass(frozen=True, slots=True)
class Scores:
    """How well a subject continues the examples. Divergence is from the reference: the whole model under `full`."""

    name: str
    visibility: str
    num_examples: int
    num_tokens: int
    perplexity: float  # exp of the mean over all response tokens
    perplexity_low: float  # 95 % interval, by drawing examples again
    perplexity_high: float
    ratio: float  # perplexity over full depth's
    ratio_low: float
    ratio_high: float
    kl: float  # mean KL(full ‖ subject), nats a token
    agreement: float  # share of tokens for which both would pick the same


@dataclass(slots=True)
class _Sums:
    """Per example."""

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)


class Scorer:
    """Scores subjects beside one reference. Examples in, figures out; `batch_size` examples at a time."""

    def __init__(self, reference: TorchDecoder, examples: Sequence[Example], *, batch_size: int = 4) -> None:
        if not examples:
            raise InvalidConfig("there is no example to score")
        self._reference, self._device = reference, next(reference.parameters()).device
        self._order = sorted(range(len(examples)), key=lambda index: examples[index].num_tokens)
        order = [examples[index] for index in self._order]
        self._batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        self._counts = [len(example.response_ids) for example in order]

    def score(self, subjects: Sequence[Subject], progress: Progress | None = None) -> list[Scores]:
        """The reference first, called "full", then the subjects in order. Raises InvalidConfig for scores that are not finite."""
        sums = self._run(subjects, progress)
        names = [("full", "full"), *((subject.name, str(subject.visibility.policy)) for subject in subjects)]
        return [_summed(name, text, own, sums[0], self._counts) for (name, text), own in zip(names, sums, strict=True)]

    def losses(self, subjects: Sequence[Subject], progress: Progress | None = None) -> list[list[float]]:
        """−log-probability of each example's response, in the order of the examples: of the reference, then of the subjects."""
        found = []
        for own in self._run(subjects, progress):
            by_place = dict(zip(self._order, own.nll, strict=True))
            found.append([by_place[index] for index in range(len(self._order))])
        return found

    @torch.inference_mode()
    def _run(self, subjects: Sequence[Subject], progress: Progress | None) -> list[_Sums]:
        whole = Visibility(VisibilityKind.FULL, boundary_tokens=1)
        sums = [_Sums() for _ in range(len(subjects) + 1)]
        done, total = 0, len(self._batches) * len(sums)
        for examples in self._batches:
            batch = make_batch(examples, whole).to(self._device)
            counts, at = [len(example.response_ids) for example in examples], batch.targets != IGNORED
            labels = batch.targets[at]
            trunk = Trunk.run(self._reference, batch)
            expected = self._reference.logits(trunk.hidden[at]).log_softmax(-1)
            _add(sums[0], expected, expected, labels, counts, "full depth")
            done += 1
            for subject, own in zip(subjects, sums[1:], strict=True):
                if progress is not None:
                    progress(subject.name, done, total)
                _add(own, self._logprobs(subject, examples, trunk), expected, labels, counts, subject.name)
                done += 1
        return sums

    def _logprobs(self, subject: Subject, examples: Sequence[Example], trunk: Trunk) -> Tensor:
        batch = make_batch(examples, subject.visibility).to(self._device)
        at = batch.targets != IGNORED
        start = None
        if subject.model is self._reference and subject.prefill_layers is None:
            depth = subject.visibility.depth(subject.model.num_layers)
            if depth == subject.model.num_layers:
                return self._reference.logits(trunk.hidden[_targets(examples)]).log_softmax(-1)
            start = trunk.start(batch, depth)
        hidden = subject.model(batch, prefill_layers=subject.prefill_layers, start=start)
        return subject.model.logits(hidden[at]).log_softmax(-1)


def _targets(examples: Sequence[Example]) -> Tensor:
    return make_batch(examples, Visibility(VisibilityKind.FULL, boundary_tokens=1)).targets != IGNORED


def _add(sums: _Sums, own: Tensor, expected: Tensor, labels: Tensor, counts: Sequence[int], name: str) -> None:
    """Rows are the response tokens of the batch's examples in order."""
    nll = -own.gather(1, labels[:, None])[:, 0]
    if not bool(nll.isfinite().all()):
        raise InvalidConfig(
            f"{name}: the model gives scores that are no finite numbers (NaN or infinite); its weights are damaged"
        )
    kl = (expected.exp() * (expected - own)).sum(-1)
    agreed = own.argmax(-1) == expected.argmax(-1)
    sums.nll += [float(part.double().sum()) for part in torch.split(nll, list(counts))]
    sums.kl += [float(part.double().sum()) for part in torch.split(kl, list(counts))]
    sums.agreed += [int(part.sum()) for part in torch.split(agreed, list(counts))]


def _summed(name: str, visibility: str, own: _Sums, reference: _Sums, counts: Sequence[int]) -> Scores:
    """Figures, with intervals from the same redrawn examples for subject and reference."""
    num_tokens, everyone = sum(counts), range(len(counts))
    rng = random.Random(0)
    perplexities, ratios = [], []
    for _ in range(_RESAMPLES):
        drawn = rng.choices(everyone, k=len(counts))
        num_drawn = sum(counts[index] for index in drawn)
        loss, base = (sum(sums.nll[index] for index in drawn) / num_drawn for sums in (own, reference))
        perplexities.append(_exp(loss))
        ratios.append(_exp(loss - base))
    mean, base = sum(own.nll) / num_tokens, sum(reference.nll) / num_tokens
    return Scores(
        name,
        visibility,
        len(counts),
        num_tokens,
        _exp(mean),
        *_interval(perplexities),
        _exp(mean - base),
        *_interval(ratios),
        max(0.0, sum(own.kl) / num_tokens),
        sum(own.agreed) / num_tokens,
    )


def _interval(drawn: list[float]) -> tuple[float, float]:
    drawn.sort()
    return drawn[round(0.025 * (len(drawn) - 1))], drawn[round(0.975 * (len(drawn) - 1))]


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))
