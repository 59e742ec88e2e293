"""Every container's command line is one that Shoal's own commands take; its files, ports and addresses are those of its pod."""

import re
from pathlib import Path

import click
import pytest
import yaml

from infra.checks.charts import Object, PodPlace, objects, of_kind, pods
from infra.checks.commands import POD, parsed
from shoal.config.images import ImageLimits
from shoal.config.serve import ServeConfig
from shoal.config.shadow import ShadowConfig
from shoal.config.worker import Pool
from shoal.router.main import read_settings
from tests.infra.conftest import need


def by_component(manifests: tuple[Object, ...]) -> dict[str, PodPlace]:
    return {place.component: place for place in pods(manifests)}


def serve_config(manifests: tuple[Object, ...]) -> ServeConfig:
    (text,) = [item["data"]["serve.yaml"] for item in of_kind(manifests, "ConfigMap") if "serve.yaml" in item["data"]]
    return ServeConfig.from_mapping(yaml.safe_load(text))


def test_commands_take_their_flags(manifests: tuple[Object, ...]) -> None:
    run = [parsed(c)[0] for place in pods(manifests) for c in place.containers if "command" in c]
    assert {"shoal.router", "shoal.launch.controller"} <= set(run)


def test_variables_of_arguments_are_set(manifests: tuple[Object, ...]) -> None:
    for place in pods(manifests):
        for container in place.containers:
            named = {name for arg in container.get("args", []) for name in re.findall(r"\$\((\w+)\)", arg)}
            assert named <= {entry["name"] for entry in container.get("env", [])}, place.name


def test_the_routers_settings_work(manifests: tuple[Object, ...]) -> None:
    (container,) = by_component(manifests)["router"].containers
    _, flags = parsed(container)
    for name in ("name", "beat_s", "log_level", "log_format"):
        flags.pop(name)
    config, serve = read_settings(**flags), serve_config(manifests)
    assert [str(v) for v in config.visibilities] == list(serve.visibilities), "router and workers allow the same, the same first"
    assert (config.model, config.max_boundary_tokens) == (serve.model, serve.max_boundary_tokens)
    assert (config.max_context or 0) == serve.max_context_tokens
    assert config.cluster == serve.cluster
    assert config.images.max_images == serve.max_images
    assert config.http_listen is None or config.http_max_body_bytes > config.images.max_image_bytes * 4 / 3, "in base64"


def test_the_gate_the_adapter_the_pace_and_images_are_those_of_the_values() -> None:
    need("helm4")
    manifests = objects("adapter-gate")
    (container,) = by_component(manifests)["router"].containers
    _, flags = parsed(container)
    assert ShadowConfig.read(flags) == ShadowConfig(rate=0.05, min_agreement=0.9, max_kl=0.5), "the rest as the router has it"
    assert (ImageLimits.read(flags), flags["http_max_body_mb"]) == (ImageLimits(4, 2.5, 10.0, 12.5), 8.0)
    serve = serve_config(manifests)
    assert (serve.adapter, serve.adapter_any_visibility) == ("/models/llama-speed-24", True)
    assert serve.autoscale.profile == "/etc/shoal/profile/profile.yaml"


def test_the_controllers_settings_work(manifests: tuple[Object, ...]) -> None:
    place = by_component(manifests)["controller"]
    (container,) = place.containers
    _, flags = parsed(container)
    assert _holds(place, container, str(flags["config_file"]))
    serve = serve_config(manifests)
    (cluster,) = of_kind(manifests, "RayCluster")
    assert serve.ray_address == f"{cluster['metadata']['name']}-head-svc.shoal.svc:6379"
    assert serve.keep_workers and serve.pool_labels and flags["ray_node"] == POD["POD_IP"]
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    for pool in Pool:
        group = groups[str(pool)]
        assert (group["replicas"], group["labels"]) == (serve.num_workers(pool), {"pool": str(pool)})
        assert group["rayStartParams"]["num-cpus"] == str(serve.threads_per_worker), "one worker fits a pod, and no second"
        assert int(group["rayStartParams"]["num-gpus"]) == (serve.transfer_backend == "nccl")
        serve.worker(pool)
        bounds = serve.autoscale_bounds(pool)
        assert bounds is None or (bounds.min_workers, bounds.max_workers) == (group["minReplicas"], group["maxReplicas"])
    if serve.autoscale_nodes == "kuberay":
        assert serve.autoscale.raycluster == cluster["metadata"]["name"] and place.spec["automountServiceAccountToken"]
        (role,) = of_kind(manifests, "Role")
        assert [(rule["resources"], rule["verbs"]) for rule in role["rules"]] == [
            (["rayclusters"], ["get", "patch"]),
            (["pods"], ["list"]),
        ]
        assert role["rules"][0]["resourceNames"] == [serve.autoscale.raycluster]


def test_ports_are_those_that_are_listened_on(manifests: tuple[Object, ...]) -> None:
    found = by_component(manifests)
    serve = serve_config(manifests)
    for component, names in (
        ("router", ("listen", "http_listen", "health_listen", "metrics")),
        ("controller", ("listen", "health_listen", "metrics_listen")),
    ):
        (container,) = found[component].containers
        _, flags = parsed(container)
        bound = {int(flags[name].rpartition(":")[2]) for name in names if flags[name]}
        assert bound == {port["containerPort"] for port in container["ports"]}, component
        doors = {"listen", "http_listen"} if component == "router" else set()  # port-forward comes by loopback
        hosts = {name: flags[name].rpartition(":")[0] for name in names if flags[name]}
        assert hosts == {name: "0.0.0.0" if name in doors else POD["POD_IP"] for name in hosts}
    for component in ("prefill", "decode"):
        (container,) = found[component].containers
        assert {p["containerPort"] for p in container["ports"]} == {
            serve.worker_port,
            int(serve.metrics_address("x-0").rpartition(":")[2]),
        }
    (service,) = [item for item in of_kind(manifests, "Service") if item["metadata"]["name"].endswith("-controller")]
    (router,) = found["router"].containers
    address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert parsed(router)[1]["controller"] == address


def test_files_are_mounted_where_they_are_read(manifests: tuple[Object, ...]) -> None:
    serve = serve_config(manifests)
    files = [serve.cluster_secret_file, serve.cluster_tls_cert, serve.cluster_tls_key, serve.cluster_tls_ca, serve.adapter]
    for component in ("controller", "prefill", "decode"):
        place = by_component(manifests)[component]
        for file in [*filter(None, files), *([serve.model] if serve.model.startswith("/") else [])]:
            assert _holds(place, place.containers[0], file), f"{component} lacks {file}"
    controller = by_component(manifests)["controller"]
    assert not (profile := serve.autoscale.profile) or _holds(controller, controller.containers[0], profile)
    router = by_component(manifests)["router"]
    for name, value in parsed(router.containers[0])[1].items():
        if isinstance(value, str) and value.startswith("/"):
            assert _holds(router, router.containers[0], value), name


def test_secrets_are_readable_by_the_processes_group_alone(manifests: tuple[Object, ...]) -> None:
    for place in pods(manifests):
        for volume in place.spec.get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440 and place.spec["securityContext"]["fsGroup"] == 10001


@pytest.mark.parametrize("arguments", [["--listen=127.0.0.1:0", "--no-such-flag"], ["--drain-s=soon"]])
def test_an_unknown_flag_is_a_failure(arguments: list[str]) -> None:
    with pytest.raises(click.UsageError):
        parsed({"command": ["python", "-m", "shoal.router"], "args": arguments})


def _holds(place: PodPlace, container: Object, file: str) -> bool:
    """Whether a path lies in a mounted volume; of a Secret with chosen keys or a subPath, exactly there."""
    volumes = {volume["name"]: volume for volume in place.spec["volumes"]}
    for mount in container["volumeMounts"]:
        if "subPath" in mount:
            if mount["mountPath"] == file:
                return True
        elif Path(file).is_relative_to(mount["mountPath"]):
            volume = volumes[mount["name"]]
            items = volume.get("secret", volume.get("configMap", {})).get("items")
            return items is None or Path(file).name in {item["path"] for item in items}
    return False
