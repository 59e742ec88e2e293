"""`shoal corpus`: training text out of what is installed, a part held out by package. Translates flags; reads nothing itself."""

from pathlib import Path

import click

from shoal.cli.failure import told_in_one_line
from shoal.cli.quality_room import quality_module


@click.command()
@click.argument("train", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("held_out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--hold", default="scipy,networkx,astropy", show_default=True, help="Packages whose texts go to HELD_OUT.")
@click.option("--site", "sites", multiple=True, type=click.Path(path_type=Path, exists=True), help="Folders of packages.")
@click.option("--docs", multiple=True, type=click.Path(path_type=Path), help="Folders of .rst, .txt or .md to learn from too.")
def corpus(train: Path, held_out: Path, hold: str, sites: tuple[Path, ...], docs: tuple[Path, ...]) -> None:
    """Write the docstrings of installed packages as JSON lines, for `shoal tune` to learn from (TRAIN) and be measured on
    (HELD_OUT). With --docs TRAIN holds as much prose of that documentation as docstrings.

    Packages are read, not imported. Which are there decides what is written: the same versions give the same files.

    \b
    shoal corpus train.jsonl held.jsonl --docs django-5.2/docs
    shoal tune --visibility speed:22 --data train.jsonl --held-out held.jsonl --output my-adapter
    """
    with told_in_one_line():
        size = quality_module("data").write_corpus(train, held_out, sites=sites, hold=hold.split(","), docs=docs)
        click.echo(f"{size.num_trained} texts to train on, {size.num_held_out} held out")
