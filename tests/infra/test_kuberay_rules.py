"""What KubeRay's operator refuses although its schema takes it (its validation of names, groups and options, version 1.7)."""

import re

from infra.checks.charts import Object, of_kind
from shoal.controller.ray_cluster import actor_environment

RESOURCES_IN_PARAMS = {"num-cpus", "num-gpus", "memory", "resources"}
LABEL = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
SET_BY_THE_OPERATOR = {
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_ADDRESS",
    "RAY_IP",
    "FQ_RAY_IP",
    "RAY_REDIS_ADDRESS",
    "RAY_enable_autoscaler_v2",
}


def cluster(manifests: tuple[Object, ...]) -> Object:
    (found,) = of_kind(manifests, "RayCluster")
    return found


def groups(manifests: tuple[Object, ...]) -> list[Object]:
    spec = cluster(manifests)["spec"]
    return [{"groupName": "head", **spec["headGroupSpec"]}, *spec["workerGroupSpecs"]]


def test_names_are_short_and_begin_with_a_letter(manifests: tuple[Object, ...]) -> None:
    name = cluster(manifests)["metadata"]["name"]
    assert len(name) <= 50 and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    names = [group["groupName"] for group in groups(manifests)]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", n) for n in names)


def test_labels_and_resources_stand_in_one_place(manifests: tuple[Object, ...]) -> None:
    for group in groups(manifests):
        parameters = group["rayStartParams"]
        assert "labels" not in parameters, "the operator refuses labels in rayStartParams"
        assert not (RESOURCES_IN_PARAMS & parameters.keys() and group.get("resources")), group["groupName"]
        assert all(isinstance(value, str) for value in parameters.values()), "parameters are texts"
        assert all(LABEL.fullmatch(value) for value in group.get("labels", {}).values())


def test_sizes_lie_within_their_bounds(manifests: tuple[Object, ...]) -> None:
    for group in cluster(manifests)["spec"]["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"], group["groupName"]
        assert group.get("numOfHosts", 1) == 1 and "suspend" not in group


def test_token_authentication_has_a_version_that_knows_it(manifests: tuple[Object, ...]) -> None:
    spec = cluster(manifests)["spec"]
    assert spec["authOptions"]["mode"] == "token"
    assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52, 0)
    (controller,) = [item for item in of_kind(manifests, "Deployment") if item["metadata"]["name"].endswith("-controller")]
    (container,) = controller["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    secret = spec["authOptions"].get("secretName", cluster(manifests)["metadata"]["name"])
    assert environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": secret, "key": "auth_token"}
    assert environment["RAY_AUTH_MODE"]["value"] == "token"


def test_gated_options_are_left_alone(manifests: tuple[Object, ...]) -> None:
    spec = cluster(manifests)["spec"]
    assert not {"networkPolicy", "tlsOptions", "gcsFaultToleranceOptions", "managedBy", "historyServerOptions"} & spec.keys()
    assert spec["enableInTreeAutoscaling"] is False and "autoscalerOptions" not in spec


def test_ray_containers_are_first_and_set_nothing_that_the_operator_sets(manifests: tuple[Object, ...]) -> None:
    for group in groups(manifests):
        pod = group["template"]["spec"]
        assert len(pod["containers"]) == 1 and "command" not in pod["containers"][0], "the operator writes `ray start`"
        assert "restartPolicy" not in pod
        own = {entry["name"] for entry in pod["containers"][0]["env"]}
        assert not own & SET_BY_THE_OPERATOR and len(own) == len(pod["containers"][0]["env"])
        mounts = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
        assert "/dev/shm" in mounts, "else the operator sizes it after the memory request"


def test_the_environment_of_workers_is_not_hidden_by_the_controllers(manifests: tuple[Object, ...]) -> None:
    """What the controller sets for NCCL overrides a pod's environment: values that say otherwise would do nothing."""
    ours = actor_environment(1, "nccl", "info", "json").keys()
    for group in cluster(manifests)["spec"]["workerGroupSpecs"]:
        pod = {entry["name"] for entry in group["template"]["spec"]["containers"][0]["env"]}
        assert not (pod & ours) - {"HF_HUB_OFFLINE"}
