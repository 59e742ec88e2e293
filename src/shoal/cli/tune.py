"""`shoal tune`: an adapter under the visibility it will be served with. Translates flags and shows progress; trains nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shoal.cli.failure import told_in_one_line
from shoal.cli.quality_room import quality_module
from shoal.errors import InvalidConfig
from shoal.model_files import DEFAULT_MODEL
from shoal.types import DType
from shoal.visibility import Visibility

_EVERY = 20  # steps between lines where there is no terminal


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--visibility", "-v", required=True, metavar="TEXT", help="As it will be served: speed:22. full: the control.")
@click.option("--data", required=True, metavar="FILE|NAME", help="A .jsonl file, or python-topics, docstrings[:PACKAGE,…].")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the adapter.")
@click.option("--held-out", metavar="FILE|NAME", help="Texts to measure perplexity on, on the way. None unless given.")
@click.option("--examples", "num_held_out", type=click.IntRange(1), default=24, show_default=True, help="Of --held-out.")
@click.option("--supervised", is_flag=True, help="Learn the data's own tokens, not the full-depth model's distribution.")
@click.option("--chat", is_flag=True, help="Put prompts through the model's chat template.")
@click.option("--tokens", default=640_000, show_default=True, help="To train on; sets the number of steps.")
@click.option("--rank", default=16, show_default=True, help="Of the adapter's matrices.")
@click.option("--alpha", default=32.0, show_default=True, help="The adapter adds alpha / rank · B·A.")
@click.option("--first-layer", default=8, show_default=True, help="Layers below stay as they are; the teacher shares them.")
@click.option("--learning-rate", default=2e-3, show_default=True, help="At its highest, after the warm-up.")
@click.option("--warmup-steps", default=20, show_default=True)
@click.option("--sequence-tokens", default=640, show_default=True, help="Of a window over plain texts.")
@click.option("--batch-sequences", default=1, show_default=True, help="Windows in a step of one process.")
@click.option("--response-tokens", default="32,48,64,96,128", show_default=True, help="Lengths a window's responses are cut to.")
@click.option("--candidates", default=12_288, show_default=True, help="Tokens that distillation compares; 0: all.")
@click.option("--clip-norm", default=1.0, show_default=True, help="Of the gradient.")
@click.option(
    "--dtype",
    type=click.Choice([str(kind) for kind in DType]),
    default="bfloat16",
    show_default=True,
    help="Of frozen weights and states.",
)
@click.option("--gradient-checkpointing", is_flag=True, help="Compute layers again in backward: slower, less memory.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(1), metavar="N", help="CPU threads. Default: torch's choice.")
@click.option("--seed", default=0, show_default=True)
@click.option("--checkpoint-s", default=60.0, show_default=True, help="Seconds between checkpoints.")
@click.option("--measure-s", default=300.0, show_default=True, help="Seconds between measurements on --held-out.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the curve: .png, .svg or .pdf.")
@click.option("--restart", is_flag=True, help="Begin anew though there is a checkpoint in --output.")
def tune(
    model: str,
    visibility: str,
    data: str,
    output: Path,
    held_out: str | None,
    num_held_out: int,
    chat: bool,
    device: str,
    threads: int | None,
    checkpoint_s: float,
    measure_s: float,
    restart: bool,
    response_tokens: str,
    plot: Path | None,
    dtype: str,
    **recipe: Any,
) -> None:
    """Tune a LoRA adapter for MODEL (a name, a .gguf file or a folder) under the exact serving visibility.

    Stop it whenever you like: the same command goes on from the last checkpoint and gives the same adapter. Several processes
    share the work under torchrun.

    \b
    shoal tune -v speed:22 --data prompts.jsonl -o adapter --held-out python-topics
    shoal serve --adapter adapter --visibilities speed:22
    torchrun --nproc-per-node 4 -m shoal.cli.main tune -v speed:22 --data prompts.jsonl -o adapter
    """
    with told_in_one_line():
        options = quality_module("tune.options").TuneOptions(
            Visibility.parse(visibility), response_tokens=_lengths(response_tokens), dtype=DType(dtype), **recipe
        )
        if plot is not None:
            quality_module("plotting").check(plot)
        pace = quality_module("tune.trainer").Pace(checkpoint_s, measure_s)
        with _shown() as told:
            result = quality_module("tune.run").tune(
                model,
                data,
                output,
                options,
                held_out=held_out,
                num_held_out=num_held_out,
                chat=chat,
                device=device,
                num_threads=threads,
                pace=pace,
                restart=restart,
                told=told,
            )
        click.echo(
            f"{result.folder}: {result.num_parameters:,} parameters, {result.num_tokens:,} tokens in {result.wall_s:.0f} s "
            f"({result.cpu_s:.0f} s of CPU)"
        )
        if result.perplexity_after is not None:
            told_full = "" if result.perplexity_full is None else f"; {result.perplexity_full:.2f} at full depth, untuned"
            closed = "" if result.gap_closed is None else f": {result.gap_closed:.0%} of the gap closed"
            before, after = result.perplexity_before, result.perplexity_after
            click.echo(f"perplexity under {visibility}: {before:.2f} before, {after:.2f} after{told_full}{closed}")
        if plot is not None:
            quality_module("tune.plot").draw_curve(output, plot)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidConfig(f"--response-tokens {text!r} must be numbers with commas between, as in 32,64") from None


@contextmanager
def _shown() -> Iterator[Callable[[Any], None]]:
    """A bar on stderr while it is a terminal, else a line every few steps and for every measurement."""
    if not sys.stderr.isatty():

        def line(report: Any) -> None:
            if report.step % _EVERY == 0 or report.perplexity is not None or report.step == report.num_steps:
                click.echo(f"step {report.step} of {report.num_steps}: {_words(report, report.perplexity)}", err=True)

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, latest = bar.add_task("loading", total=None), None

        def move(report: Any) -> None:
            nonlocal latest
            latest = report.perplexity or latest
            bar.update(task, completed=report.step, total=report.num_steps, description=_words(report, latest))

        yield move


def _words(report: Any, perplexity: float | None) -> str:
    words = f"loss {report.loss:.4f}, {report.tokens_per_s:.0f} tokens/s"
    return words if perplexity is None else f"{words}, perplexity {perplexity:.2f}"
