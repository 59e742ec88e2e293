"""`shoal version`, and what `shoal --version` prints."""

import platform
from typing import Final

import click

import shoal

VERSION_TEXT: Final = f"shoal {shoal.__version__} (Python {platform.python_version()})"


@click.command()
def version() -> None:
    """Print Shoal's and Python's version."""
    click.echo(VERSION_TEXT)
