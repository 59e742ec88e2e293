"""What a RayCluster's worker group should become, from what it is and where workers are. Pure; knows no API.

KubeRay deletes the pods that `workersToDelete` names and then makes or deletes as many as `replicas` asks for: with replicas
below what is left it would delete any. So the group shrinks only by pods that are named, hold no worker (also none that drains),
and are taken off `replicas` in the same write; names of pods that are gone are cleared, as KubeRay never does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from shoal.controller.machines import Held
from shoal.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Pod:
    """A worker's machine."""

    name: str
    group: str
    is_running: bool
    is_leaving: bool  # marked for deletion

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> Self:
        meta = item.get("metadata") or {}
        labels = meta.get("labels") or {}
        phase = (item.get("status") or {}).get("phase")
        return cls(
            str(meta.get("name", "")),
            str(labels.get("ray.io/group", "")),
            phase == "Running",
            bool(meta.get("deletionTimestamp")),
        )


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Of a RayCluster, one pod a replica. Raises InvalidConfig for a group that cannot be scaled by pods."""

    name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    to_delete: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Self:
        name = str(spec.get("groupName", ""))
        if int(spec.get("numOfHosts") or 1) != 1:
            raise InvalidConfig(
                f"worker group {name!r} has numOfHosts {spec['numOfHosts']}; autoscaling needs one pod for each worker"
            )
        if spec.get("suspend"):
            raise InvalidConfig(f"worker group {name!r} is suspended; set suspend to false, or do not scale its pool")
        least = int(spec.get("minReplicas") or 0)
        most = spec.get("maxReplicas")
        strategy = spec.get("scaleStrategy") or {}
        return cls(
            name,
            int(spec.get("replicas") or 0),
            least,
            int(most) if most is not None else 2**31 - 1,
            tuple(map(str, strategy.get("workersToDelete") or ())),
        )

    def patched(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """The group's spec with these replicas and names, all else as it is."""
        strategy = {**(spec.get("scaleStrategy") or {}), "workersToDelete": list(self.to_delete)}
        return {**spec, "replicas": self.replicas, "scaleStrategy": strategy}


def settled(group: WorkerGroup, pods: Iterable[Pod], held: Held) -> WorkerGroup:
    """The group as it should be now: a pod for each worker, none without one. Equal to `group` when nothing is to be done.

    While workers wait for a place, or some worker is on no pod of the group, no pod is given up: it might be theirs.
    """
    own = [pod for pod in pods if pod.group == group.name]
    names = {pod.name for pod in own}
    to_delete = tuple(name for name in group.to_delete if name in names)
    needed = len(held.machines) + held.num_unplaced
    if needed >= group.replicas:
        return WorkerGroup(
            group.name, max(group.replicas, min(needed, group.max_replicas)), group.min_replicas, group.max_replicas, to_delete
        )
    empty = [pod for pod in own if not pod.is_leaving and pod.name not in held.machines and pod.name not in to_delete]
    if held.num_unplaced or held.machines - names:
        empty = []
    num_surplus = group.replicas - max(needed, group.min_replicas)
    given_up = sorted(empty, key=lambda pod: (pod.is_running, pod.name))[: max(0, num_surplus)]
    to_delete = (*to_delete, *(pod.name for pod in given_up))
    return WorkerGroup(group.name, group.replicas - len(given_up), group.min_replicas, group.max_replicas, to_delete)
