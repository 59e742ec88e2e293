"""Machines by way of KubeRay: a RayCluster's worker groups get a replica for each worker of their pools. Knows the API's objects.

Level-triggered: each look reads the RayCluster and its pods and writes what is missing, so a lost answer, a restarted controller
or somebody else's change mends itself at the next look.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from shoal.config.autoscale import AutoscaleConfig, Bounds
from shoal.config.worker import Pool
from shoal.controller.kubernetes import Conflict, KubernetesApi
from shoal.controller.machines import Held
from shoal.controller.worker_groups import Pod, WorkerGroup, settled
from shoal.errors import InvalidConfig, NotFound, Unavailable

_log = logging.getLogger(__name__)

_TRIES: Final = 5  # of a write that somebody else's write came before
Json = Mapping[str, Any]


class KubeRayMachines:
    """`check` once, before anything starts."""

    may_come = True

    def __init__(self, api: KubernetesApi, config: AutoscaleConfig) -> None:
        self._api, self._name = api, config.raycluster
        self._groups = {Pool.PREFILL: config.prefill_group, Pool.DECODE: config.decode_group}
        namespace = api.access.namespace
        self._where = f"RayCluster {namespace}/{self._name}"
        self._cluster_path = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{self._name}"
        self._pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self._most: dict[Pool, int] = {}

    async def check(self, bounds: Mapping[Pool, Bounds]) -> None:
        """See that the RayCluster is there, fits the bounds, and may be read and patched; its pods listed.

        Raises NotFound, InvalidConfig, Unauthenticated, Unavailable, with what to change.
        """
        with _as_expected(self._where):
            await self._check(bounds)

    async def _check(self, bounds: Mapping[Pool, Bounds]) -> None:
        cluster = await self._read()
        if cluster["spec"].get("enableInTreeAutoscaling"):
            raise InvalidConfig(
                f"{self._where} has enableInTreeAutoscaling: two autoscalers would write its replicas; turn it "
                f"off, or use autoscale_nodes ray"
            )
        for pool, own in bounds.items():
            group = self._group(cluster, pool)
            self._most[pool] = group.max_replicas
            words = f"autoscale_{pool} {own} and {self._where}, group {group.name!r}, contradict each other"
            if own.max_workers > group.max_replicas:
                raise InvalidConfig(
                    f"{words}: raise its maxReplicas from {group.max_replicas} to {own.max_workers}, or lower MAX"
                )
            if own.min_workers < group.min_replicas:
                raise InvalidConfig(
                    f"{words}: lower its minReplicas from {group.min_replicas} to {own.min_workers}, or raise MIN"
                )
        await self._pods()
        await self._write(cluster, {}, dry_run=True)

    async def most(self, pool: Pool) -> int | None:
        return self._most.get(pool)

    async def settle(self, held: Mapping[Pool, Held]) -> None:
        with _as_expected(self._where):
            await self._settle(held)

    async def _settle(self, held: Mapping[Pool, Held]) -> None:
        for _ in range(_TRIES):
            cluster, pods = await self._read(), await self._pods()
            changed: dict[str, WorkerGroup] = {}
            for pool, where in held.items():
                group = self._group(cluster, pool)
                self._most[pool] = group.max_replicas
                wanted = settled(group, pods, where)
                if wanted != group:
                    changed[group.name] = wanted
                    _log.info(
                        "%s, group %s: replicas %d → %d, to be deleted: %s",
                        self._where, group.name, group.replicas, wanted.replicas, ", ".join(wanted.to_delete) or "none",
                    )  # fmt: skip
            if not changed:
                return
            try:
                await self._write(cluster, changed)
                return
            except Conflict as error:
                _log.info("%s; reading it again", error)
        raise Unavailable(f"{self._where} was changed by others {_TRIES} times while we would; trying again at the next look")

    async def _read(self) -> dict[str, Any]:
        try:
            cluster = await self._api.get(self._cluster_path)
        except NotFound as error:
            raise NotFound(
                f"there is no {self._where}: check autoscale.raycluster and autoscale.namespace, and that KubeRay "
                f"is installed ({error})"
            ) from None
        if not isinstance(cluster.get("spec"), dict) or not isinstance(cluster.get("metadata"), dict):
            raise Unavailable(f"the Kubernetes API's answer for {self._where} is no RayCluster")
        return cluster

    async def _pods(self) -> list[Pod]:
        selector = f"ray.io/cluster={self._name},ray.io/node-type=worker"
        items = (await self._api.get(self._pods_path, labelSelector=selector)).get("items") or []
        return [Pod.of(item) for item in items]

    def _group(self, cluster: Json, pool: Pool) -> WorkerGroup:
        specs = cluster["spec"].get("workerGroupSpecs") or []
        for spec in specs:
            if spec.get("groupName") == self._groups[pool]:
                return WorkerGroup.of(spec)
        names = ", ".join(str(spec.get("groupName")) for spec in specs) or "none"
        raise NotFound(f"{self._where} has no worker group {self._groups[pool]!r} (it has {names}); set autoscale.{pool}_group")

    async def _write(self, cluster: Json, changed: Mapping[str, WorkerGroup], *, dry_run: bool = False) -> None:
        """All groups in one write, since a merge patch replaces lists whole; refused when anybody wrote since we read."""
        specs = cluster["spec"].get("workerGroupSpecs") or []
        groups = [changed[spec["groupName"]].patched(spec) if spec.get("groupName") in changed else spec for spec in specs]
        version = cluster["metadata"].get("resourceVersion")
        body = {"metadata": {"resourceVersion": version}, "spec": {"workerGroupSpecs": groups}}
        await self._api.merge_patch(self._cluster_path, body, dry_run=dry_run)


@contextmanager
def _as_expected(where: str) -> Iterator[None]:
    """Answers of another shape than the API's own are Unavailable, and asked for again."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Unavailable(f"what the Kubernetes API says of {where} cannot be read ({type(error).__name__}: {error})") from error
