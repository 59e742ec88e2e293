"""A calibration as a YAML file: profile, hardware and link, and how the measured workers were set up. Knows the file's form."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from shoal.errors import InvalidConfig
from shoal.simulator.calibration.fit import Fit
from shoal.simulator.hardware import Gpu, Link, gpu_from_entry, link_from_entry
from shoal.simulator.profiles import Profile

_FORMAT = "shoal-profile-1"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What `--profile FILE` brings."""

    profile: Profile
    gpu: Gpu
    link: Link


def is_profile_file(name: str) -> bool:
    """Whether a profile's name is the path of a file."""
    return name.endswith((".yaml", ".yml", ".json"))


def write_profile(path: Path, fitted: Fit, setup: Mapping[str, Any]) -> None:
    """Write YAML. Raises InvalidConfig when the file cannot be written."""
    profile = {field.name: getattr(fitted.profile, field.name) for field in fields(Profile)}
    document = {
        "format": _FORMAT,
        "profile": profile,
        "gpu": {
            "name": fitted.gpu.name,
            "bf16_tflops": fitted.gpu.flops / 1e12,
            "memory_gb": fitted.gpu.memory_bytes / 1e9,
            "memory_gb_s": fitted.gpu.memory_bytes_per_s / 1e9,
            "nvlink_gb_s": fitted.gpu.nvlink_bytes_per_s / 1e9,
            "nic_gb_s": fitted.gpu.nic_bytes_per_s / 1e9,
            **({} if fitted.gpu.usd_per_hour is None else {"usd_per_hour": fitted.gpu.usd_per_hour}),
            "source": fitted.gpu.source,
        },
        "link": {
            "name": fitted.link.name,
            "gb_s": fitted.link.bytes_per_s / 1e9,
            "latency": f"{1e6 * fitted.link.latency_s:g}us",
            "source": fitted.link.source,
        },
        "measured_with": dict(setup),
        "notes": list(fitted.notes),
    }
    try:
        path.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"cannot write {path}: {error.strerror}") from error


def read_profile(path: Path) -> Calibrated:
    """Raises InvalidConfig that names the file and the field."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise InvalidConfig(f"{path} is no profile that `shoal calibrate` wrote: it is larger than {_MAX_BYTES:,} bytes")
        document = yaml.safe_load(text.decode("utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise InvalidConfig(f"cannot read the profile {path}: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise InvalidConfig(f"{path} is no profile that `shoal calibrate` wrote (format: {_FORMAT})")
    values, gpu, link = (document.get(part) for part in ("profile", "gpu", "link"))
    if not isinstance(values, dict) or not isinstance(gpu, dict) or not isinstance(link, dict):
        raise InvalidConfig(f"{path} should have the sections profile, gpu and link")
    unknown = set(values) - {field.name for field in fields(Profile)}
    if unknown:
        raise InvalidConfig(f"{path}: a profile has no {sorted(map(str, unknown))[0]!r}")
    try:
        profile = Profile(**values)
    except TypeError as error:
        raise InvalidConfig(f"{path}: profile: {error}") from None
    return Calibrated(profile, gpu_from_entry(gpu), link_from_entry(link))
