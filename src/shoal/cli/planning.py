"""Options and output that the planning commands share. Knows how things are asked for; computes nothing."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from shoal.cli.failure import told_in_one_line
from shoal.errors import InvalidConfig
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.hardware import Gpu
from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.profiles import Profile, default_profile, profile_named
from shoal.simulator.tables import to_csv, to_json, to_table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Command = TypeVar("Command", bound=Callable[..., Any])
_WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5, "fp32": 4.0}


def model_options(command: Command) -> Command:
    """--model, --gpu, --tp, --profile, --set, --weights, --kv, --catalogue."""
    for option in reversed(
        (
            click.option("--model", "model_name", required=True, help="Catalogue name, or a Hugging Face config.json."),
            click.option("--gpu", "gpu_name", default="h100", show_default=True, help="Catalogue name."),
            click.option("--tp", type=int, default=1, show_default=True, help="GPUs of one worker (tensor parallelism)."),
            click.option("--profile", "profile_name", help="Efficiencies: kernels-a100, kernels-h100, engine, ideal."),
            click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change one number of the profile."),
            click.option("--weights", type=click.Choice(list(_WEIGHT_BYTES)), default="bf16", show_default=True),
            click.option("--kv", type=click.Choice(["bf16", "fp8", "fp32"]), default="bf16", show_default=True),
            click.option("--catalogue", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Your own YAML."),
        )
    ):
        command = option(command)
    return command


def format_option(command: Command) -> Command:
    """--format table | csv | json."""
    return click.option(
        "--format", "output", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True, help="Output."
    )(command)


def reports_errors(command: Command) -> Command:
    """End like every command: errors as one line on stderr and an exit code."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with told_in_one_line():
            return command(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def catalogues(path: Path | None) -> Catalogues:
    """The shipped entries with a user's beside them."""
    shipped = Catalogues.shipped()
    return shipped if path is None else shipped.extended(path)


def model_of(names: Catalogues, model_name: str, weights: str, kv: str) -> ModelSpec:
    """The model at the wanted precision."""
    return names.model(model_name).with_precision(weight_bytes=_WEIGHT_BYTES[weights], kv_bytes=_WEIGHT_BYTES[kv])


def profile_of(gpu: Gpu, profile_name: str | None, changes: Sequence[str]) -> Profile:
    """The named profile, else the GPU's default, with `--set` changes."""
    profile = default_profile(gpu.name) if profile_name is None else profile_named(profile_name)
    values = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            values[name.strip()] = float(text)
        except ValueError:
            raise InvalidConfig(f"--set {change!r} is not NAME=NUMBER, as in gemm=0.6") from None
    return profile.changed(**values) if values else profile


def machine_of(names: Catalogues, gpu_name: str, tp: int, profile_name: str | None, changes: Sequence[str]) -> Machine:
    """A worker of `tp` GPUs."""
    gpu = names.gpu(gpu_name)
    return Machine(gpu, profile_of(gpu, profile_name, changes), tp)


def show(
    rows: "Sequence[DataclassInstance]", output: str, *, title: str, headings: Mapping[str, str], about: Mapping[str, Any]
) -> None:
    """Print rows as asked. Tables go through rich, CSV and JSON plain."""
    if output == "csv":
        click.echo(to_csv(rows), nl=False)
    elif output == "json":
        click.echo(to_json(rows, about))
    else:
        Console(width=200).print(to_table(rows, title, headings))


def split_list(values: Sequence[str]) -> list[str]:
    """Repeated and comma-separated values as one list."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]
