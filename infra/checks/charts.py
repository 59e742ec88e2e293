"""Renders the chart with either major of Helm, and looks into what came out. Knows files and YAML; judges nothing."""

import functools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "infra" / "charts" / "shoal"
TOOLS: Final = Path(os.environ.get("INFRA_TOOLS", ROOT / ".venv-infra")) / "bin"
MATRIX: Final = tuple(path.name.removesuffix("-values.yaml") for path in sorted((CHART / "ci").glob("*-values.yaml")))
HELMS: Final = ("helm3", "helm4")
NAMESPACE: Final = "shoal"
Object = dict[str, Any]


class RenderError(Exception):
    """Helm refused the values; the text is Helm's own."""


def tool(name: str) -> Path | None:
    """A binary of `make infra-check`; None when it is not there."""
    path = TOOLS / name
    return path if os.access(path, os.X_OK) else None


def render_text(helm: str, *arguments: str) -> str:
    """`helm template` of the chart. Raises RenderError, FileNotFoundError."""
    path = tool(helm)
    if path is None:
        raise FileNotFoundError(helm)
    command = [str(path), "template", "shoal", str(CHART), "--namespace", NAMESPACE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RenderError(done.stderr)
    return done.stdout


@functools.cache
def rendered(values: str, helm: str = "helm4") -> str:
    """The manifests of one file of the matrix, as text."""
    return render_text(helm, "--values", str(CHART / "ci" / f"{values}-values.yaml"))


@functools.cache
def objects(values: str, helm: str = "helm4") -> tuple[Object, ...]:
    """The same, parsed."""
    return parse(rendered(values, helm))


def parse(text: str) -> tuple[Object, ...]:
    """The objects of a YAML stream."""
    return tuple(document for document in yaml.safe_load_all(text) if document)


@dataclass(frozen=True, slots=True)
class PodPlace:
    """One pod of the manifests and where it stands."""

    name: str  # Kind/name, of a Ray group also /group
    component: str
    labels: dict[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        """Init containers first."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def pods(manifests: tuple[Object, ...]) -> Iterator[PodPlace]:
    """Every pod that these objects make, Ray's included."""
    for item in manifests:
        name = f"{item['kind']}/{item['metadata']['name']}"
        if item["kind"] == "Pod":
            yield _place(name, item["metadata"], item["spec"])
        elif item["kind"] in ("Deployment", "Job"):
            template = item["spec"]["template"]
            yield _place(name, template["metadata"], template["spec"])
        elif item["kind"] == "RayCluster":
            groups = [("head", item["spec"]["headGroupSpec"])]
            groups += [(group["groupName"], group) for group in item["spec"]["workerGroupSpecs"]]
            for group_name, group in groups:
                template = group["template"]
                yield _place(f"{name}/{group_name}", template["metadata"], template["spec"])


def _place(name: str, metadata: Object, spec: Object) -> PodPlace:
    labels = metadata["labels"]
    return PodPlace(name, labels["app.kubernetes.io/component"], labels, spec)


def of_kind(manifests: tuple[Object, ...], kind: str) -> list[Object]:
    """Those objects of one kind."""
    return [item for item in manifests if item["kind"] == kind]
