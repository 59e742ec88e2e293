"""How far a measurement is: one bar on a terminal, a line for each new thing elsewhere. Knows no measurement."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.simulator.calibration.measure import Told

__all__ = ["Told", "progress_bar"]


@contextmanager
def progress_bar() -> Iterator[Told]:
    """A bar on stderr while it is a terminal, else a line for every new thing."""
    if not sys.stderr.isatty():
        latest = ""

        def line(what: str, num_done: int, total: int) -> None:
            nonlocal latest
            if what != latest:
                latest = what
                click.echo(f"{what} ({num_done} of {total} done)", err=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, num_done, total: bar.update(task, description=what, completed=num_done, total=total)
