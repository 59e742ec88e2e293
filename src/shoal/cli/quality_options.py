"""Flags that `shoal diagnose` and `shoal eval` share: which data, how many examples, how long. Knows no measurement."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from shoal.cli.quality_room import quality_module
from shoal.errors import InvalidConfig
from shoal.model_files import ModelFiles, open_model

Command = TypeVar("Command", bound=Callable[..., Any])


def data_options(command: Command) -> Command:
    """--data, --examples, --prompt-tokens, --response-tokens, --chat, --seed, --device, --threads."""
    options = (
        click.option(
            "--data",
            default="python-topics",
            show_default=True,
            metavar="FILE|NAME",
            help="A .jsonl file of texts, prompts with responses, or conversations; or python-topics, docstrings[:PACKAGE,…].",
        ),
        click.option("--examples", "max_examples", type=int, default=24, show_default=True, help="At most so many."),
        click.option("--prompt-tokens", type=int, default=512, show_default=True, help="Of a plain text."),
        click.option("--response-tokens", type=int, default=64, show_default=True, help="Of a plain text."),
        click.option("--chat", is_flag=True, help="Put prompts through the model's chat template."),
        click.option("--seed", type=int, default=0, show_default=True, help="Which excerpts; which sampled labels."),
        click.option("--device", default="cpu", show_default=True, help="cpu or cuda, as torch calls it."),
        click.option("--threads", type=int, metavar="N", help="CPU threads. Default: torch's choice."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def load(
    name: str, data: str, threads: int | None, device: str, *, adapter: str = "", **options: Any
) -> tuple[ModelFiles, Any, Any]:
    """The model's files, its torch decoder, and the data: what both commands begin with."""
    if threads is not None and threads < 1:
        raise InvalidConfig(f"--threads must be at least 1, not {threads}")
    quality_module("machine").use(device, threads)
    files = open_model(name, adapter)
    module = quality_module("data")
    loaded = module.load_data(data, files, module.DataOptions(**options))
    return files, quality_module("torch_model").TorchDecoder.load(files, device=device).eval(), loaded


def load_adapted(name: str, adapter: str, device: str) -> Any:
    """The torch decoder of a model with an adapter merged. Raises as `open_model` does for one that does not fit."""
    return quality_module("torch_model").TorchDecoder.load(open_model(name, adapter), device=device).eval()


@contextlib.contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Turns an error of the file system while `path` is written into one that names it."""
    try:
        yield
    except OSError as error:
        raise InvalidConfig(f"cannot write {str(path)!r}: {error.strerror}") from error
