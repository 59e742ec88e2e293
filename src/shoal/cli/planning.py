"""Options and output that the planning commands share. Knows how things are asked for; computes nothing."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from rich.console import Console

from shoal.cli.failure import told_in_one_line
from shoal.errors import InvalidConfig
from shoal.simulator.calibration.profile_file import Calibrated, is_profile_file, read_profile
from shoal.simulator.catalogues import Catalogues
from shoal.simulator.hardware import Gpu, Link
from shoal.simulator.machine import Machine
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.profiles import Profile, default_profile, profile_named
from shoal.simulator.tables import to_csv, to_json, to_table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_GPU: Final = "h100"
DEFAULT_LINK: Final = "100gbe"
PROFILE_HELP: Final = "Efficiencies: kernels-a100, kernels-h100, engine, ideal, or a file that `shoal calibrate` wrote."
_WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5, "fp32": 4.0}


def model_options(command: Command) -> Command:
    """--model, --gpu, --tp, --profile, --set, --weights, --kv, --catalogue."""
    for option in reversed(
        (
            click.option("--model", "model_name", required=True, help="Catalogue name, or a Hugging Face config.json."),
            click.option("--gpu", "gpu_name", help=f"Catalogue name; default: {DEFAULT_GPU}, or the profile file's."),
            click.option("--tp", type=int, default=1, show_default=True, help="GPUs of one worker (tensor parallelism)."),
            click.option("--profile", "profile_name", help=PROFILE_HELP),
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
    """The model at the wanted precision. Hidden states are float32 where the weights are, else bfloat16."""
    hidden = 4.0 if weights == "fp32" else 2.0
    spec = names.model(model_name)
    return spec.with_precision(weight_bytes=_WEIGHT_BYTES[weights], kv_bytes=_WEIGHT_BYTES[kv], hidden_bytes=hidden)


def calibrated_of(profile_name: str | None) -> Calibrated | None:
    """What the file of `--profile FILE` holds; None when a profile is named instead, or none is."""
    return read_profile(Path(profile_name)) if profile_name is not None and is_profile_file(profile_name) else None


def gpu_of(names: Catalogues, gpu_name: str | None, profile_name: str | None) -> Gpu:
    """The named GPU, else the one of the profile's file, else the default."""
    calibrated = calibrated_of(profile_name)
    if gpu_name is None and calibrated is not None:
        return calibrated.gpu
    return names.gpu(gpu_name or DEFAULT_GPU)


def link_of(names: Catalogues, link_name: str | None, profile_name: str | None) -> Link:
    """The named link, else the one of the profile's file, else the default."""
    calibrated = calibrated_of(profile_name)
    if link_name is None and calibrated is not None:
        return calibrated.link
    return names.link(link_name or DEFAULT_LINK)


def profile_of(gpu: Gpu, profile_name: str | None, changes: Sequence[str]) -> Profile:
    """The named profile or the file's, else the GPU's default, with `--set` changes."""
    calibrated = calibrated_of(profile_name)
    if calibrated is not None:
        profile = calibrated.profile
    else:
        profile = default_profile(gpu.name) if profile_name is None else profile_named(profile_name)
    values = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            values[name.strip()] = float(text)
        except ValueError:
            raise InvalidConfig(f"--set {change!r} is not NAME=NUMBER, as in gemm=0.6") from None
    return profile.changed(**values) if values else profile


def machine_of(names: Catalogues, gpu_name: str | None, tp: int, profile_name: str | None, changes: Sequence[str]) -> Machine:
    """A worker of `tp` GPUs."""
    gpu = gpu_of(names, gpu_name, profile_name)
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
