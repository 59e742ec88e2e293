"""Both majors of Helm make the same objects of every file of the matrix, again and again; the kinds' schemas take them."""

import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from infra.checks.charts import CHART, ROOT, TOOLS, Object, objects, pods, render_text, rendered, tool
from infra.checks.kinds import SCHEMAS
from tests.infra.conftest import need

KUBERAY_CHECK = Path(os.environ.get("KUBERAY_CHECK") or ROOT / "shared" / "k8s" / "check_manifests.py")


def test_both_majors_make_the_same_objects(values: str) -> None:
    need("helm3")
    assert objects(values, "helm3") == objects(values, "helm4")


def test_output_is_deterministic(values: str, helm: str) -> None:
    again = render_text(helm, "--values", str(CHART / "ci" / f"{values}-values.yaml"))
    assert again == rendered(values, helm)


def test_the_chart_is_linted(helm: str) -> None:
    for values in sorted((CHART / "ci").glob("*.yaml")):
        done = subprocess.run(
            [str(tool(helm)), "lint", "--strict", str(CHART), "--values", str(values)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_built_in_kinds_are_valid(values: str, manifests: tuple[Object, ...], tmp_path: Path) -> None:
    """Ray's pods too, as pods: its own schema is checked below where it can be had."""
    need("kubernetes-validate")
    file = tmp_path / f"{values}.yaml"
    ray_pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": place.component, "labels": place.labels}, "spec": place.spec}
        for place in pods(manifests)
    ]
    file.write_text(yaml.safe_dump_all([*manifests, *ray_pods]))
    done = subprocess.run([str(TOOLS / "kubernetes-validate"), "--strict", str(file)], capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    unknown = {line.split("for kind ")[1].split()[0] for line in lines if "Couldn't find schema for kind" in line}
    assert done.returncode == 0 and not [line for line in lines if line.startswith("ERROR")], "\n".join(lines)
    assert unknown <= {kind for _, kind in SCHEMAS} | {"RayCluster"}, "these kinds are checked nowhere"


def test_other_kinds_are_valid(manifests: tuple[Object, ...]) -> None:
    for item in manifests:
        if (schema := SCHEMAS.get((item["apiVersion"], item["kind"]))) is not None:
            jsonschema.Draft202012Validator(schema).validate(item)


def test_kuberay_takes_the_raycluster(values: str, tmp_path: Path) -> None:
    if not KUBERAY_CHECK.is_file():
        pytest.skip("KubeRay's strict schemas are not there: KUBERAY_CHECK may name a script that checks files against them")
    file = tmp_path / f"{values}.yaml"
    file.write_text(rendered(values))
    done = subprocess.run([sys.executable, str(KUBERAY_CHECK), str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 KubeRay objects checked, 0 errors" in done.stdout
