"""`shoal diagnose`: which layers a prompt needs, and the prefill depth that follows. Prints; measures nothing itself."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from shoal.cli.failure import told_in_one_line
from shoal.cli.progress_bar import progress_bar
from shoal.cli.quality_options import data_options, load, writing
from shoal.cli.quality_room import quality_module
from shoal.errors import InvalidConfig
from shoal.model_files import DEFAULT_MODEL


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@data_options
@click.option("--adapter", default="", metavar="FOLDER", help="Merge this adapter into the weights first.")
@click.option("--tolerance", type=float, default=1.05, show_default=True, help="Perplexity over full depth's that is accepted.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write every figure.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), metavar="FILE", help="Draw it: .png, .svg or .pdf.")
def diagnose(
    model: str,
    data: str,
    device: str,
    threads: int | None,
    tolerance: float,
    json_path: Path | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Show what each layer of MODEL (a name, a .gguf file or a folder) is worth to prompts and to answers.

    Importance is the estimated loss increase, in nats a response token, when the layer is removed for prefill tokens alone or for
    decode tokens alone; sight, when response tokens see only the first token and each other there. docs/quality.md explains both.

    \b
    shoal diagnose smollm2-135m --json diagnosis.json --plot diagnosis.png
    shoal diagnose ./my-model --data conversations.jsonl --examples 64
    """
    with told_in_one_line():
        if not 1 < tolerance < 100:
            raise InvalidConfig(f"--tolerance {tolerance} must be above 1, as in 1.05 for 5 % more perplexity")
        room = quality_module("diagnose")
        if plot_path is not None:
            quality_module("plotting").check(plot_path)
        files, decoder, loaded = load(model, data, threads, device, **options)
        with progress_bar() as told:
            found = room.diagnose(files, decoder, loaded, tolerance=tolerance, seed=options["seed"], progress=told)
        if json_path is not None:
            with writing(json_path):
                json_path.write_text(json.dumps(found.to_json(), indent=1) + "\n")
        if plot_path is not None:
            room.draw(found, plot_path)
        _print(found)


def _print(found: Any) -> None:
    console = Console(width=118, highlight=False)
    console.print(
        f"{found.model}: {found.num_examples} examples of {found.data}, {found.num_response_tokens} response tokens\n"
        "nats a response token (× 1000); share of attention; 1 − cosine"
    )
    table = Table(box=None, header_style="")
    for name in ("layer", "prefill", "±", "decode", "±", "sight", "on anchor", "on prompt", "on decode", "drift", "decode drift"):
        table.add_column(name, justify="right")
    for layer in found.layers:
        importance = [f"{1000 * value:.2f}" for own in (layer.prefill, layer.decode) for value in (own.layer, own.layer_error)]
        mass = [f"{share:.0%}" for share in (layer.mass_on_anchor, layer.mass_on_prompt, layer.mass_on_decode)]
        drift = [f"{layer.prefill_drift:.3f}", f"{layer.decode_drift:.3f}"]
        table.add_row(str(layer.layer), *importance, f"{1000 * layer.sight:.2f}", *mass, *drift)
    console.print(table)
    for own in found.recommendations:
        measured = ", ".join(f"K={depth} {ratio:.3f}" for depth, ratio in sorted(own.measured_ratios.items()))
        console.print(f"{own.kind}: predicted K = {own.predicted_depth}; perplexity over full depth's, measured: {measured}")
        if own.recommended_depth is None:
            console.print(f"  no measured depth stays within {own.tolerance:g} × full depth: serve full, or tune")
        else:
            console.print(f"  recommended: --visibilities {own.text}  (the smallest K within {own.tolerance:g} × full depth)")
