"""A Kubernetes API of kmock's stateful kind, with what a RayCluster needs of it: versions that conflict, and KubeRay's operator.

The operator does what KubeRay 1.7's reconcilePods does: deletes the pods that workersToDelete names, then makes pods up to
`replicas`, or, where more are left, deletes any.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp.web
import kmock

NAMESPACE = "inference"
CLUSTERS = kmock.resource("ray.io/v1/rayclusters")
PODS = kmock.resource("v1/pods")


def ray_cluster(name: str = "shoal", **groups: dict[str, Any]) -> dict[str, Any]:
    """A RayCluster with two worker groups of one replica, each with more fields given by its name."""
    specs = [
        {"groupName": pool, "replicas": 1, "minReplicas": 1, "maxReplicas": 8, "template": {"spec": {"containers": []}}}
        | groups.get(pool, {})
        for pool in ("prefill", "decode")
    ]
    metadata = {"name": name, "namespace": NAMESPACE, "resourceVersion": "1"}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": {"workerGroupSpecs": specs}}


class FakeApi(kmock.KubernetesEmulator):
    """`answers` are given, in order, to the next requests instead of what the emulator would say: (status, headers)."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.asked: list[tuple[str, str]] = []  # verb and path
        self.tokens: list[str] = []
        self.before_patch: list[Any] = []  # called, one for each patch, before it is looked at
        self.num_allowed: int | None = None  # requests until all are forbidden
        self.deleted_at_random: list[str] = []
        self._num_made = 0

    async def _handle(self, request: Any) -> Any:
        self.asked.append((str(request.method), request.url.path))
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.num_allowed is not None:
            self.num_allowed -= 1
            if self.num_allowed < 0:
                return aiohttp.web.json_response({"message": "no right"}, status=403)
        if self.answers:
            status, headers = self.answers.pop(0)
            return aiohttp.web.json_response({"message": f"as told: {status}"}, status=status, headers=headers)
        if str(request.method).lower().endswith("patch"):
            if self.before_patch:
                self.before_patch.pop(0)()
            if (given := request.data["metadata"].get("resourceVersion")) not in (None, self.version):
                words = f"the object has been modified: {given} is not {self.version}"
                return aiohttp.web.json_response({"message": words}, status=409)
            if "dryRun" in request.params:
                return aiohttp.web.json_response(self.cluster)
            response = await super()._handle(request)
            self.bump()
            return response
        return await super()._handle(request)

    @property
    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = self.objects[CLUSTERS, NAMESPACE, "shoal"].raw
        return found

    @property
    def version(self) -> str:
        return str(self.cluster["metadata"]["resourceVersion"])

    def bump(self) -> None:
        """As after any write."""
        self.objects[CLUSTERS, NAMESPACE, "shoal"].patch({"metadata": {"resourceVersion": str(int(self.version) + 1)}})

    def group(self, name: str) -> dict[str, Any]:
        return next(spec for spec in self.cluster["spec"]["workerGroupSpecs"] if spec["groupName"] == name)

    def pods(self, group: str) -> list[str]:
        return sorted(
            name for (resource, _, name), pod in self.objects.items()
            if resource == PODS and not pod.deleted and pod.raw["metadata"]["labels"]["ray.io/group"] == group
        )  # fmt: skip

    def operate(self) -> None:
        """One pass of the operator."""
        for spec in self.cluster["spec"]["workerGroupSpecs"]:
            group = spec["groupName"]
            for name in spec.get("scaleStrategy", {}).get("workersToDelete", []):
                if name in self.pods(group):
                    self.objects[PODS, NAMESPACE, name].delete()
            left = self.pods(group)
            for name in left[: max(0, len(left) - spec["replicas"])]:
                self.deleted_at_random.append(name)
                self.objects[PODS, NAMESPACE, name].delete()
            for _ in range(spec["replicas"] - len(left)):
                self._num_made += 1
                name = f"shoal-{group}-worker-{self._num_made:03}"
                labels = {"ray.io/cluster": "shoal", "ray.io/node-type": "worker", "ray.io/group": group}
                pod = {"metadata": {"name": name, "namespace": NAMESPACE, "labels": labels}, "status": {"phase": "Running"}}
                self.objects[PODS, NAMESPACE, name] = pod


@asynccontextmanager
async def fake_api(cluster: dict[str, Any] | None = None) -> AsyncIterator[tuple[FakeApi, str]]:
    """The server and its URL; with a RayCluster there is one, and the operator has made its pods."""
    async with FakeApi() as api, kmock.Server(api, host="127.0.0.1") as server:
        api.resources[CLUSTERS] = {"kind": "RayCluster", "namespaced": True, "verbs": {"get", "list", "patch"}}
        api.resources[PODS] = {"kind": "Pod", "namespaced": True, "verbs": {"list"}}
        if cluster is not None:
            api.objects[CLUSTERS, NAMESPACE, cluster["metadata"]["name"]] = cluster
            api.operate()
        yield api, f"http://127.0.0.1:{server.port}"
