"""The kustomize overlays build, change what they say, and their bases are what the chart makes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from infra.checks.charts import ROOT, Object, of_kind, parse, pods, tool
from infra.checks.render import COPIES, TARGETS, made
from tests.infra.conftest import need

OVERLAYS = ("cpu-demo", "two-pool-gpu")


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    need("kubectl")
    return subprocess.run([str(tool("kubectl")), "kustomize", str(folder)], capture_output=True, text=True)


@pytest.mark.parametrize("path", TARGETS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_rendered_files_are_up_to_date(path: Path) -> None:
    need("helm3")
    assert parse(path.read_text()) == parse(made(path)), "run `make infra-render`"


@pytest.mark.parametrize("copy", COPIES, ids=lambda path: path.name)
def test_the_chart_brings_the_newest_dashboard_and_rules(copy: Path) -> None:
    assert copy.read_text() == COPIES[copy].read_text(), "run `make infra-render`"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_builds(overlay: str, tmp_path: Path) -> None:
    folder = tmp_path / overlay
    shutil.copytree(ROOT / "infra" / "kustomize" / overlay, folder)
    (folder / "secret").write_text("0" * 64)
    done = built(folder)
    assert done.returncode == 0, done.stderr
    manifests = parse(done.stdout)
    assert {item["metadata"].get("namespace") for item in manifests} == {"shoal"}
    variant = "cpu" if overlay == "cpu-demo" else "cuda"
    assert {c["image"] for place in pods(manifests) for c in place.containers} == {
        "ghcr.io/shoal-serving/shoal-router:0.1.0",
        f"ghcr.io/shoal-serving/shoal-worker:0.1.0-{variant}",
    }
    groups = {group["groupName"]: group for group in _cluster(manifests)["spec"]["workerGroupSpecs"]}
    if overlay == "two-pool-gpu":
        sizes = {group["template"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] for group in groups.values()}
        assert sizes == {"4Gi"}, "the patch is in force"
        (text,) = [item["data"]["serve.yaml"] for item in of_kind(manifests, "ConfigMap") if "serve.yaml" in item["data"]]
        told = {name: parse(text)[0][f"autoscale_{name}"] for name in groups}
        assert told == {name: f"{group['minReplicas']}-{group['maxReplicas']}" for name, group in groups.items()}
    else:
        (secret,) = of_kind(manifests, "Secret")
        assert secret["metadata"]["name"] == "shoal-cluster-secret" and set(secret["data"]) == {"secret"}


def test_the_demo_without_its_secret_says_which_file_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "cpu-demo"
    shutil.copytree(ROOT / "infra" / "kustomize" / "cpu-demo", folder, ignore=shutil.ignore_patterns("secret"))
    done = built(folder)
    assert done.returncode != 0 and "secret" in done.stderr


def _cluster(manifests: tuple[Object, ...]) -> Object:
    (cluster,) = of_kind(manifests, "RayCluster")
    return cluster
