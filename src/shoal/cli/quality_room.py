"""The door from commands to the quality room, which needs torch; commands do not, so it is imported by name when asked for."""

import importlib
from types import ModuleType

from shoal.errors import InvalidConfig


def quality_module(name: str) -> ModuleType:
    """shoal.quality.`name`. Raises InvalidConfig that says what to install where a package is missing."""
    try:
        return importlib.import_module(f"shoal.quality.{name}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] == "shoal":
            raise
        raise InvalidConfig(f"{missing.name} is not installed; run: pip install -e '.[serve]'") from missing
