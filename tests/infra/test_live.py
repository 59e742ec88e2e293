"""What the chart asks a live cluster: missing Secrets and kinds are named, and an upgrade leaves the pools' sizes alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from infra.checks.charts import RenderError, objects, of_kind, parse, render_text

kmock = pytest.importorskip("kmock", reason="the fake Kubernetes API comes with the dev extra")

KUBECONFIG = """apiVersion: v1
kind: Config
clusters: [{name: here, cluster: {server: "http://127.0.0.1:PORT"}}]
contexts: [{name: here, context: {cluster: here, user: me}}]
current-context: here
users: [{name: me, user: {}}]
"""
OPERATORS = {
    "ray.io/v1": "KubeRay first",
    "cert-manager.io/v1": "cert-manager",
    "monitoring.coreos.com/v1": "the Prometheus operator",
}


@contextlib.asynccontextmanager
async def cluster(
    folder: Path, *secrets: str, missing: str = "", sizes: dict[str, int] | None = None, minor: int = 33
) -> AsyncIterator[list[str]]:
    """A cluster with these Secrets, all kinds but one, and perhaps a RayCluster; yields Helm's flags to ask it."""
    async with kmock.KubernetesEmulator() as api, kmock.Server(api, host="127.0.0.1") as server:
        kinds = {(item["apiVersion"], item["kind"]) for item in objects("default")} | {("v1", "Secret"), ("v1", "Namespace")}
        there = [kind for kind in sorted(kinds) if kind[0] != missing]
        for version, kind in there:
            api.resources[kmock.resource(f"{version}/{_plural(kind)}")] = {
                "kind": kind,
                "namespaced": True,
                "verbs": {"get", "list"},
            }
        core = [
            {"name": _plural(kind), "kind": kind, "namespaced": kind != "Namespace", "verbs": ["get"]}
            for version, kind in there
            if version == "v1"
        ]
        api["get /api/v1"] << {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1", "resources": core}
        api["get /api/v1/namespaces/shoal"] << {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shoal"}}
        api["get /version"] << {"major": "1", "minor": str(minor), "gitVersion": f"v1.{minor}.0"}
        for name in secrets:
            api.objects[kmock.resource("v1/secrets"), "shoal", name] = _object("v1", "Secret", name)
        if sizes is not None:
            groups = [{"groupName": pool, "replicas": size} for pool, size in sizes.items()]
            live = _object("ray.io/v1", "RayCluster", "shoal") | {"spec": {"workerGroupSpecs": groups}}
            live["metadata"] |= {
                "labels": {"app.kubernetes.io/managed-by": "Helm"},
                "annotations": {"meta.helm.sh/release-name": "shoal", "meta.helm.sh/release-namespace": "shoal"},
            }
            api.objects[kmock.resource("ray.io/v1/rayclusters"), "shoal", "shoal"] = live
        config = folder / "kubeconfig"
        config.write_text(KUBECONFIG.replace("PORT", str(server.port)))
        known = [
            flag for version, _ in there for flag in ("--api-versions", version)
        ]  # Helm 3 does not ask for these in a dry run
        yield [
            "--dry-run=server",
            "--disable-openapi-validation",
            "--kubeconfig",
            str(config),
            "--kube-version",
            f"1.{minor}.0",
            *known,
        ]


def _plural(kind: str) -> str:
    return kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")


def _object(version: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": "shoal"}}


async def test_a_missing_secret_is_named(helm: str, tmp_path: Path) -> None:
    async with cluster(tmp_path) as flags:
        with pytest.raises(RenderError, match='the Secret "shoal-cluster-secret" is missing in namespace shoal'):
            await asyncio.to_thread(render_text, helm, *flags)
    async with cluster(tmp_path, "shoal-cluster-secret") as flags:
        with pytest.raises(RenderError, match='the Secret "shoal-tokens" is missing'):
            await asyncio.to_thread(render_text, helm, *flags, "--set", "tokens.secretName=shoal-tokens")


@pytest.mark.parametrize("missing", OPERATORS)
async def test_a_missing_operator_is_named(helm: str, missing: str, tmp_path: Path) -> None:
    async with cluster(tmp_path, "shoal-cluster-secret", missing=missing) as flags:
        with pytest.raises(RenderError, match=f"this cluster knows no {missing}: install {OPERATORS[missing]}"):
            await asyncio.to_thread(render_text, helm, *flags)


async def test_an_image_volume_needs_a_newer_cluster(helm: str, tmp_path: Path) -> None:
    oci = ("--set", "model.source=oci,model.oci.reference=registry.example.com/llama:v1")
    async with cluster(tmp_path, "shoal-cluster-secret", minor=32) as flags:
        with pytest.raises(RenderError, match=r"which Kubernetes does from 1\.33 on, and this cluster is v?1\.32\.0"):
            await asyncio.to_thread(render_text, helm, *flags, *oci)


async def test_an_upgrade_leaves_the_sizes_that_the_controller_chose(helm: str, tmp_path: Path) -> None:
    async with cluster(tmp_path, "shoal-cluster-secret", sizes={"prefill": 3, "decode": 11}) as flags:
        text = await asyncio.to_thread(render_text, helm, *flags)
        fixed = await asyncio.to_thread(render_text, helm, *flags, "--set", "autoscaling.enabled=false")
    assert _sizes(text) == {"prefill": 3, "decode": 8}, "those of the cluster, within the bounds"
    assert _sizes(fixed) == {"prefill": 1, "decode": 1}


def _sizes(text: str) -> dict[str, int]:
    (found,) = of_kind(parse(text), "RayCluster")
    return {group["groupName"]: group["replicas"] for group in found["spec"]["workerGroupSpecs"]}
