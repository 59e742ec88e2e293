"""One tuning run from files to adapter: opens, joins, trains, writes. Knows every part; computes nothing itself."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.engine.dtypes import torch_dtype
from shoal.errors import InvalidConfig
from shoal.model_files import open_model
from shoal.quality.data import read_records
from shoal.quality.tune.checkpoint import STATE_FILE, Progress
from shoal.quality.tune.data import held_out_windows, training_tokens
from shoal.quality.tune.export import write_adapter
from shoal.quality.tune.options import TuneOptions
from shoal.quality.tune.peers import join_peers
from shoal.quality.tune.trainer import Pace, StepReport, Trainer


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a run ends with. Perplexities are of the held-out texts; None without any."""

    folder: Path
    num_parameters: int
    num_tokens: int
    wall_s: float  # of all parts of the run together
    cpu_s: float
    perplexity_before: float | None
    perplexity_after: float | None
    perplexity_full: float | None  # of the untuned model at full depth

    @property
    def gap_closed(self) -> float | None:
        """Share of what the visibility costs that the adapter won back; None where it costs nothing."""
        before, after, full = self.perplexity_before, self.perplexity_after, self.perplexity_full
        if before is None or after is None or full is None or before <= full:
            return None
        return (before - after) / (before - full)


def tune(
    model: str,
    data: str,
    folder: Path,
    options: TuneOptions,
    *,
    held_out: str | None = None,
    num_held_out: int = 24,
    chat: bool = False,
    device: str = "cpu",
    num_threads: int | None = None,
    pace: Pace | None = None,
    restart: bool = False,
    told: Callable[[StepReport], None] = lambda _: None,
) -> TuneResult:
    """Tune `model` on `data` (a .jsonl file or a shipped text's name) and write the adapter to `folder`, with every checkpoint.

    Goes on from the folder's checkpoint when there is one. `told` is called by the first process alone. Raises InvalidConfig
    for what cannot work, InvalidRequest when training diverges.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    place = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device 'cuda': this process sees no GPU, or torch is a CPU build; use 'auto' or 'cpu'")
    files = open_model(model)
    tokens = training_tokens(read_records(data), files, options, chat=chat)
    boundary = options.visibility.boundary_tokens or 1
    held = (
        held_out_windows(read_records(held_out), files, count=num_held_out, seed=options.seed, boundary=boundary)
        if held_out
        else []
    )
    peers = join_peers(place)
    if place.type == "cuda":
        place = torch.device("cuda", peers.rank % torch.cuda.device_count())
    try:
        if restart and peers.is_first:
            (folder / STATE_FILE).unlink(missing_ok=True)
        peers.wait()
        trainer = Trainer(files, options, tokens, folder, held_out=held, device=place, peers=peers, pace=pace)
        progress = trainer.run(
            told if peers.is_first else lambda _: None, lambda progress: _write(trainer, progress, data, held_out)
        )
        peers.wait()
    finally:
        peers.leave()
    measured = [point["perplexity"] for point in progress.curve]
    return TuneResult(
        folder,
        trainer.lora.num_parameters,
        progress.num_tokens,
        progress.wall_s,
        progress.cpu_s,
        measured[0] if measured else None,
        measured[-1] if measured else None,
        progress.curve[0].get("full_depth_perplexity") if progress.curve else None,
    )


def _write(trainer: Trainer, progress: Progress, data: str, held_out: str | None) -> None:
    """The adapter as it is now."""
    options, files = trainer.options, trainer.files
    write_adapter(
        trainer.folder,
        files,
        trainer.lora.parameters,
        rank=options.rank,
        alpha=options.alpha,
        layers=range(options.first_layer, files.config.shape.num_layers),
        dtype=torch_dtype(options.dtype),
        notes={
            "visibility": str(options.visibility.policy),
            "steps": [progress.step, trainer.num_steps],
            "tokens": progress.num_tokens,
            "data": Path(data).name,
            "held_out": held_out and Path(held_out).name,
            "recipe": options.to_mapping(),
            "num_processes": trainer.num_processes,
            "wall_s": round(progress.wall_s, 1),
            "cpu_s": round(progress.cpu_s, 1),  # of the first process
            "curve": progress.curve,
        },
    )
