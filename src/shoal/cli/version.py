"""`shoal version`."""

import platform

import click

import shoal


@click.command()
def version() -> None:
    """Print Shoal's and Python's version."""
    click.echo(f"shoal {shoal.__version__} (Python {platform.python_version()})")
