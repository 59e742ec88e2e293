"""`shoal models`: what can be opened by name."""

from typing import Final

import click
from rich.console import Console
from rich.table import Table

from shoal.cli.failure import told_in_one_line
from shoal.model_files import DEFAULT_MODEL, known_models

_WIDTH_WHEN_PIPED: Final = 140


@click.command()
def models() -> None:
    """List the models that can be opened by name. A path to a .gguf file or a Hugging Face folder works everywhere too."""
    with told_in_one_line():
        table = Table(box=None)
        for heading in ("name", "model", "parameters", "licence", "installed"):
            table.add_column(heading, overflow="fold")
        for model in known_models():
            name = f"{model.name} (default)" if model.name == DEFAULT_MODEL else model.name
            installed = "yes" if model.installed else "no"
            table.add_row(name, model.title, f"{model.num_parameters / 1e6:.0f} M", model.license, installed)
        console = Console()
        console = console if console.is_terminal else Console(width=_WIDTH_WHEN_PIPED)
        console.print(table)
        for model in known_models():
            if not model.installed:  # outside the table, which breaks lines: this one is copied
                click.echo(f"\nto install {model.name}:\n{model.install_command}")
