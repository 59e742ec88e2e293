"""Every container's command line is one that Shoal's own commands take; its files, ports and addresses are those of its pod."""

import importlib
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from infra.checks.charts import Object, PodPlace, of_kind, pods
from shoal.cli.main import cli
from shoal.config.router import RouterConfig
from shoal.config.serve import ServeConfig
from shoal.config.tls import ClusterConfig, TlsConfig
from shoal.config.worker import Pool
from shoal.router.main import parse_visibilities

MODULES = {"shoal.router": "shoal.router.main:command", "shoal.launch.controller": "shoal.launch.controller:main"}
POD = {"POD_IP": "10.0.0.7", "POD_NAME": "pod-7"}


def parsed(container: Object) -> tuple[str, dict[str, Any]]:
    """What runs, and its options as click reads them. Fails for an unknown flag, a value of the wrong kind, an unset variable."""
    command, arguments = container["command"], [_expanded(arg) for arg in container["args"]]
    if command[:2] == ["python", "-m"]:
        module, _, name = MODULES[command[2]].partition(":")
        target: click.Command = getattr(importlib.import_module(module), name)
        return command[2], target.make_context(command[2], arguments).params
    assert command == ["shoal"]
    context = click.Context(cli)
    found = cli.get_command(context, arguments[0])
    assert found is not None, arguments[0]
    return f"shoal {arguments[0]}", found.make_context(arguments[0], arguments[1:], parent=context).params


def _expanded(argument: str) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: POD[match[1]], argument)


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
    tls = TlsConfig(*(flags.pop(f"tls_{name}") for name in ("cert", "key", "ca", "require_client_cert")))
    cluster = ClusterConfig(*(flags.pop(f"cluster_{name}") for name in ("secret_file", "tls_cert", "tls_key", "tls_ca")))
    visibilities = parse_visibilities(flags.pop("visibilities"))
    flush_s, body = flags.pop("flush_ms") / 1e3, int(flags.pop("http_max_body_mb") * 1e6)
    config = RouterConfig(visibilities=visibilities, flush_s=flush_s, http_max_body_bytes=body, tls=tls, cluster=cluster, **flags)
    serve = serve_config(manifests)
    assert [str(v) for v in visibilities] == list(serve.visibilities), "router and workers allow the same, the same first"
    assert (config.model, config.max_boundary_tokens) == (serve.model, serve.max_boundary_tokens)
    assert (config.max_context or 0) == serve.max_context_tokens
    assert config.cluster == serve.cluster


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
        assert all(flags[name].startswith(POD["POD_IP"] + ":") for name in names if flags[name])
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
    files = [serve.cluster_secret_file, serve.cluster_tls_cert, serve.cluster_tls_key, serve.cluster_tls_ca]
    for component in ("controller", "prefill", "decode"):
        place = by_component(manifests)[component]
        for file in [*filter(None, files), *([serve.model] if serve.model.startswith("/") else [])]:
            assert _holds(place, place.containers[0], file), f"{component} lacks {file}"
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
            items = volumes[mount["name"]].get("secret", {}).get("items")
            return items is None or Path(file).name in {item["path"] for item in items}
    return False
