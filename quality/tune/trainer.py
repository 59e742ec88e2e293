"""The loop: a step is windows → both passes → loss → averaged gradients → optimizer. Stoppable and resumable anywhere."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from shoal.engine.weights import HeldLayers, load_weights
from shoal.errors import InvalidConfig, InvalidRequest
from shoal.model_files import ModelFiles
from shoal.quality.tune.batch import IGNORED, Window, make_tune_batch
from shoal.quality.tune.checkpoint import Progress, load_state, save_state
from shoal.quality.tune.lora import Lora
from shoal.quality.tune.loss import distillation_loss, supervised_loss
from shoal.quality.tune.model import TunedModel
from shoal.quality.tune.options import TuneOptions
from shoal.quality.tune.peers import Peers
from shoal.quality.tune.windows import TrainingTokens, WindowSource

_BETAS: Final = (0.9, 0.98)
_SMOOTHING: Final = 0.95  # of the loss that is shown
_HELD_ROWS: Final = 4  # held-out windows at once

Told = Callable[["StepReport"], None]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step says of itself. `perplexity`: of the held-out windows, where it was measured."""

    step: int
    num_steps: int
    num_tokens: int
    loss: float  # smoothed
    tokens_per_s: float
    perplexity: float | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """When a run saves and measures. Changes nothing of what it gives."""

    checkpoint_s: float = 60.0
    measure_s: float = 300.0  # only where there are held-out windows


class Trainer:
    """One run over one model. `run` may be stopped at any time and goes on from the last checkpoint."""

    def __init__(
        self,
        files: ModelFiles,
        options: TuneOptions,
        tokens: TrainingTokens,
        folder: Path,
        *,
        held_out: Sequence[Window] = (),
        device: torch.device | str = "cpu",
        peers: Peers | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Raises InvalidConfig when options, data or the folder's checkpoint do not fit, Unsupported for the model's kind."""
        shape = files.config.shape
        visibility = options.visibility.resolve(shape.num_layers)
        for name, size in (("sequence_tokens", options.sequence_tokens), *(("a prompt", len(w.ids)) for w in tokens.given)):
            if size > shape.max_context:
                raise InvalidConfig(f"{name} of {size} tokens exceeds the model's context of {shape.max_context}; shorten it")
        if options.first_layer >= shape.num_layers:
            raise InvalidConfig(f"first_layer {options.first_layer} leaves nothing to tune of {shape.num_layers} layers")
        self.files, self.options, self.folder = files, options, folder
        self._peers, self._pace, self._held_out = peers or Peers(), pace or Pace(), tuple(held_out)
        self._device = torch.device(device)
        self._source = WindowSource(tokens, options, rank=self._peers.rank, num_processes=self._peers.num_processes)
        self.num_steps = self._source.num_steps
        data = (len(tokens.text), int(tokens.text.sum(dtype="int64")), len(tokens.given), self.num_steps)
        self._digest = options.digest(files.revision, files.adapter_digest, data, self._peers.num_processes)
        self._resumed = load_state(folder, self._digest)
        self.progress = Progress(self._digest) if self._resumed is None else self._resumed[1]
        held = HeldLayers.everything(shape.num_layers)
        weights, _ = load_weights(files, held, dtype=options.dtype, device=str(self._device))
        self._model = TunedModel(weights, visibility, checkpointing=options.gradient_checkpointing)
        candidates = None if options.supervised else self._source.candidates()
        self._head = self._model.head if candidates is None else self._model.head[torch.from_numpy(candidates).to(self._device)]
        self.lora = Lora(files.config, options.first_layer, options.rank, options.alpha, options.seed)
        self.lora.to(self._device)
        self._optimizer = torch.optim.AdamW(list(self.lora), lr=options.learning_rate, betas=_BETAS, weight_decay=0.0)
        self._loss: float | None = None
        if self._resumed is not None:
            self._restore(self._resumed[0])

    @property
    def num_processes(self) -> int:
        return self._peers.num_processes

    def run(self, told: Told, saved: Callable[[Progress], None] = lambda _: None) -> Progress:
        """Train to the end, saving on the way; `saved` is called after each checkpoint, in the first process.

        Raises InvalidRequest when the loss is no number: the last checkpoint stays.
        """
        begun, cpu, saved_at, measured_at = time.monotonic(), time.process_time(), time.monotonic(), time.monotonic()
        wall_before, cpu_before, first = self.progress.wall_s, self.progress.cpu_s, self.progress.step
        if self.progress.step == 0:
            self._measure()
        while self.progress.step < self.num_steps:
            self._step()
            self.progress.wall_s = wall_before + time.monotonic() - begun
            self.progress.cpu_s = cpu_before + time.process_time() - cpu
            is_last, perplexity = self.progress.step == self.num_steps, None
            now = time.monotonic()
            measures, saves = self._peers.as_first_says(
                is_last or now - measured_at > self._pace.measure_s, is_last or now - saved_at > self._pace.checkpoint_s
            )
            if measures:
                perplexity, measured_at = self._measure(), time.monotonic()
            if saves:
                self.save(saved)
                saved_at = time.monotonic()
            a_step = (time.monotonic() - begun) / (self.progress.step - first)
            rate = self.progress.num_tokens / self.progress.step / a_step
            told(StepReport(self.progress.step, self.num_steps, self.progress.num_tokens, self._loss or 0.0, rate, perplexity))
        return self.progress

    def save(self, saved: Callable[[Progress], None]) -> None:
        """Write a checkpoint (the first process does)."""
        if self._peers.is_first:
            save_state(self.folder, self._state(), self.progress)
            saved(self.progress)
        self._peers.wait()

    def perplexities(self, *, with_teacher: bool) -> tuple[float, float | None] | None:
        """Of the held-out windows' responses under the tuned visibility, and of the untuned model at full depth, both over the
        whole vocabulary; None without held-out windows."""
        totals, count = [0.0, 0.0], 0
        with torch.no_grad():
            for start in range(0, len(self._held_out), _HELD_ROWS):
                batch = make_tune_batch(self._held_out[start : start + _HELD_ROWS]).to(self._device)
                passes = self._model.run(batch, self.lora, with_teacher=with_teacher)
                kept = (batch.targets != IGNORED).flatten()
                labels, num_kept = batch.targets.flatten()[kept], int(kept.sum())
                for index, states in enumerate((passes.student, passes.teacher)):
                    if states is not None:
                        totals[index] += num_kept * float(supervised_loss(states[kept], labels, self._model.head))
                count += num_kept
        if not count:
            return None
        return math.exp(totals[0] / count), math.exp(totals[1] / count) if with_teacher else None

    def _measure(self) -> float | None:
        found = self.perplexities(with_teacher=not self.progress.curve) if self._peers.is_first else None
        self._peers.wait()
        if found is None:
            return None
        point: dict[str, Any] = {"tokens": self.progress.num_tokens, "wall_s": self.progress.wall_s, "cpu_s": self.progress.cpu_s}
        point |= {"loss": self._loss, "perplexity": found[0]} | ({} if found[1] is None else {"full_depth_perplexity": found[1]})
        self.progress.curve.append(point)
        return found[0]

    def _step(self) -> None:
        number = self.progress.step
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.rate_at(number, self.num_steps)
        batch = make_tune_batch(self._source.step(number)).to(self._device)
        is_supervised = self.options.supervised
        passes = self._model.run(batch, self.lora, with_teacher=not is_supervised)
        kept, targets = (batch.targets != IGNORED).flatten(), batch.targets.flatten()
        if passes.teacher is None:
            loss = supervised_loss(passes.student[kept], targets[kept], self._head)
        else:
            loss = distillation_loss(passes.student[kept], passes.teacher[kept], self._head)
        self._optimizer.zero_grad(set_to_none=False)
        loss.backward()  # type: ignore[no-untyped-call]
        told = loss.detach().clone()[None]
        self._peers.average_([*(t.grad for t in self.lora if t.grad is not None), told])
        norm = torch.nn.utils.clip_grad_norm_(list(self.lora), self.options.clip_norm)
        if not (torch.isfinite(told).all() and torch.isfinite(norm)):
            raise InvalidRequest(
                f"the loss of step {number + 1} is {float(told):g} (gradient {float(norm):g}): training has diverged. The last "
                f"good checkpoint is kept in {self.folder}; run the same command with a lower --learning-rate than "
                f"{self.options.learning_rate:g} to go on from there"
            )
        self._optimizer.step()
        self._loss = float(told) if self._loss is None else _SMOOTHING * self._loss + (1 - _SMOOTHING) * float(told)
        self.progress.step += 1
        self.progress.num_tokens += batch.num_tokens * self._peers.num_processes

    def _state(self) -> dict[str, Tensor]:
        state = {f"adapter.{name}": tensor for name, tensor in self.lora.parameters.items()}
        for name, tensor in self.lora.parameters.items():
            moments = self._optimizer.state[tensor]
            state |= {f"{key}.{name}": moments[key] for key in ("exp_avg", "exp_avg_sq", "step") if key in moments}
        return state | {"loss": torch.tensor(-1.0 if self._loss is None else self._loss, dtype=torch.float64)}

    def _restore(self, state: dict[str, Tensor]) -> None:
        self.lora.load({name: state[f"adapter.{name}"] for name in self.lora.parameters})
        for name, tensor in self.lora.parameters.items():
            self._optimizer.state[tensor] = {key: state[f"{key}.{name}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")}
        self._loss = float(state["loss"])
