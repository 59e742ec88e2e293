"""`shoal models`: what can be opened by name."""

import click
from rich.console import Console
from rich.table import Table

from shoal.cli.failure import told_in_one_line
from shoal.model_files import DEFAULT_MODEL, known_models


@click.command()
def models() -> None:
    """List the models that can be opened by name. A path to a .gguf file or a Hugging Face folder works everywhere too."""
    with told_in_one_line():
        table = Table("name", "model", "parameters", "licence", "installed", box=None)
        for model in known_models():
            name = f"{model.name} (default)" if model.name == DEFAULT_MODEL else model.name
            installed = "yes" if model.installed else f"no: {model.install_command}"
            table.add_row(name, model.title, f"{model.num_parameters / 1e6:.0f} M", model.license, installed)
        Console().print(table)
