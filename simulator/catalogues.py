"""The models, GPUs, links and prices that have names: shipped with Shoal or added by the user. Knows files, no formulas."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Self, TypeVar

import yaml

from shoal.errors import InvalidConfig, NotFound
from shoal.simulator.hardware import Gpu, Link, gpu_from_entry, link_from_entry, link_from_text, with_price
from shoal.simulator.model_entries import model_from_entry, model_from_hf_config
from shoal.simulator.model_spec import ModelSpec
from shoal.simulator.names import find, unique

Json = Mapping[str, object]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Catalogues:
    """Entries by name and alias."""

    models: Mapping[str, ModelSpec]
    gpus: Mapping[str, Gpu]
    links: Mapping[str, Link]

    @classmethod
    def shipped(cls) -> Self:
        """What comes with Shoal, each entry with its source."""
        folder = files("shoal.simulator") / "catalogue"
        hardware = json.loads((folder / "hardware.json").read_text())
        models = json.loads((folder / "models.json").read_text())
        return cls(
            _named(models, model_from_entry, "models"),
            _named(hardware["gpus"], gpu_from_entry, "gpus"),
            _named(hardware["links"], link_from_entry, "links"),
        )

    def extended(self, path: Path) -> "Catalogues":
        """With a user's YAML: lists `models`, `gpus` and `links`, and a mapping `prices` of GPU to USD per hour.

        Raises InvalidConfig that names the file and the entry, NotFound for a price of an unknown GPU.
        """
        try:
            given = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise InvalidConfig(f"cannot read the catalogue {path}: {error}") from error
        if not isinstance(given, dict) or not set(given) <= {"models", "gpus", "links", "prices"}:
            raise InvalidConfig(f"{path}: expected the sections models, gpus, links and prices (each optional)")
        gpus = {**self.gpus, **_named(given.get("gpus") or [], gpu_from_entry, f"{path}: gpus")}
        prices = given.get("prices") or {}
        if not isinstance(prices, dict) or not all(isinstance(price, int | float) for price in prices.values()):
            raise InvalidConfig(f"{path}: prices should map GPU names to USD per hour")
        for name, price in prices.items():
            gpu = find(str(name), gpus, "GPU", "prices name GPUs of the catalogue")
            gpus = {key: with_price(gpu, price) if value is gpu else value for key, value in gpus.items()}
        return Catalogues(
            {**self.models, **_named(given.get("models") or [], model_from_entry, f"{path}: models")},
            gpus,
            {**self.links, **_named(given.get("links") or [], link_from_entry, f"{path}: links")},
        )

    def model(self, name: str) -> ModelSpec:
        """A catalogue name, a config.json, or a folder that holds one. Raises NotFound with the nearest names."""
        path = Path(name)
        path = path / "config.json" if path.is_dir() else path
        if path.suffix == ".json":
            return _hf_model(path)
        return find(name, self.models, "model", "or give the path of a Hugging Face config.json")

    def gpu(self, name: str) -> Gpu:
        """Raises NotFound with the nearest names."""
        return find(name, self.gpus, "GPU", "or describe it in a YAML catalogue (--catalogue)")

    def link(self, name: str) -> Link:
        """A catalogue name, or a bandwidth such as 40Gb/s. Raises NotFound with the nearest names."""
        try:
            return find(name, self.links, "link", "or give a bandwidth such as 40Gb/s, or a YAML catalogue (--catalogue)")
        except NotFound:
            if not name[:1].isdigit() and name[:1] not in "+-.":
                raise
        return link_from_text(name)


def _hf_model(path: Path) -> ModelSpec:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot read the model {path}: {error}") from error
    if not isinstance(config, dict):
        raise InvalidConfig(f"{path}: expected an object")
    return model_from_hf_config(config, path.parent.resolve().name or str(path))


def _named(entries: object, read: Callable[[Json], Value], where: str) -> dict[str, Value]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidConfig(f"{where}: expected a list of entries")
    named: dict[str, Value] = {}
    for entry in entries:
        value = read(entry)
        for name in unique([str(entry.get("name", "")), *entry.get("aliases", [])]):
            if not name:
                raise InvalidConfig(f"{where}: an entry has no name")
            named[name] = value
    return named
