"""A run's state on disk, written whole or not at all: adapter, optimizer, how far it is. Knows no model."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import InvalidConfig

STATE_FILE: Final = "checkpoint.safetensors"


@dataclass(slots=True)
class Progress:
    """How far a run is. `curve`: what was measured on the way, oldest first."""

    digest: str  # of options, model, data and number of processes
    step: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


def save_state(folder: Path, tensors: Mapping[str, Tensor], progress: Progress) -> None:
    """Replace the folder's checkpoint. Raises InvalidConfig when it cannot be written."""
    write_tensors(folder / STATE_FILE, tensors, {"progress": json.dumps(asdict(progress))})


def load_state(folder: Path, digest: str) -> tuple[dict[str, Tensor], Progress] | None:
    """The folder's checkpoint, or None. Raises InvalidConfig when it is damaged or of another run."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            progress = Progress(**json.loads((file.metadata() or {})["progress"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidConfig(f"{path} cannot be read ({error}); remove it to begin anew") from error
    if progress.digest != digest:
        raise InvalidConfig(
            f"{path} is of a run with other options, data, model or number of processes; give the same, another --output, or "
            "--restart to begin anew"
        )
    return tensors, progress


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file beside `path` and move it there. Raises InvalidConfig when it cannot be written."""
    beside = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, beside, dict(metadata))
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.chmod(0o644)  # the library makes it readable by its owner alone, and workers may be somebody else
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        raise InvalidConfig(f"cannot write {path}: {error}; free some space or give another --output") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """The same for a JSON file."""
    beside = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise InvalidConfig(f"cannot write {path}: {error.strerror}; free some space or give another --output") from error
