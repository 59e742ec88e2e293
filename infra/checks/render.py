"""`python -m infra.checks.render`: the rendered manifests that the repository holds. A check sees that they are up to date."""

from pathlib import Path
from typing import Final

from infra.checks.charts import CHART, ROOT, render_text, tool

HEADER: Final = "# Made by `make infra-render` from infra/charts/shoal and ci/{values}-values.yaml: do not edit.\n"
TARGETS: Final = {  # file: values and flags. kustomize has no hooks, so tests are left out there
    ROOT / "infra" / "rendered" / "default.yaml": ("default", ()),
    ROOT / "infra" / "kustomize" / "cpu-demo" / "rendered.yaml": ("cpu-demo", ("--skip-tests",)),
    ROOT / "infra" / "kustomize" / "two-pool-gpu" / "rendered.yaml": ("two-pool-gpu", ("--skip-tests",)),
}


def made(path: Path) -> str:
    """What a file of TARGETS should hold. Raises FileNotFoundError without Helm."""
    values, flags = TARGETS[path]
    helm = "helm3" if tool("helm3") else "helm4"
    lines = render_text(helm, "--values", str(CHART / "ci" / f"{values}-values.yaml"), *flags).splitlines()
    return HEADER.format(values=values) + "\n".join(line for line in lines if line.strip()) + "\n"


COPIES: Final = {  # what other parts of infra/ make and the chart brings along: Helm reads nothing outside its chart
    CHART / "files" / "shoal.rules.yaml": ROOT / "infra" / "alerts" / "shoal.rules.yaml",
    CHART / "files" / "shoal.json": ROOT / "infra" / "dashboards" / "shoal.json",
}


def main() -> None:
    """Write them all."""
    for copy, source in COPIES.items():
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(source.read_text())
    for path in TARGETS:
        path.write_text(made(path))


if __name__ == "__main__":
    main()
