"""Ray's cluster file, the systemd units and the compose file: valid for the tools that read them, and every command line real."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from shoal.cli.health import health
from shoal.cli.serve import serve
from shoal.config.reading import read_yaml
from shoal.config.serve import ServeConfig
from shoal.router.main import command as router
from shoal.rpc import Address

INFRA = Path(__file__).parents[2] / "infra"
UNITS = sorted((INFRA / "systemd").glob("*.service"))


def parsed(command: click.Command, arguments: list[str]) -> dict[str, Any]:
    """What click makes of a command line. Raises click's errors for unknown flags and values that cannot be."""
    return command.make_context("test", list(arguments), resilient_parsing=False).params


def parse_ours(words: list[str]) -> dict[str, Any]:
    """A command line of Shoal's or Ray's, given by its program's name."""
    match [Path(words[0]).name, *words[1:]]:
        case ["shoal", "serve", *rest]:
            return parsed(serve, rest)
        case ["shoal", "health", *rest]:
            return parsed(health, rest)
        case ["python", "-m", "shoal.router", *rest]:
            return parsed(router, rest)
        case ["ray", name, *rest]:
            from ray.scripts.scripts import cli

            return parsed(cli.commands[name], rest)
    raise AssertionError(f"who is {words}?")


def test_rays_cluster_file_is_one_for_ray() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text())
    validate_config(prepare_config(dict(config)))
    assert config["max_workers"] == len(config["provider"]["worker_ips"])
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        stop, start = (re.sub(r"^RAY_AUTH_MODE=token ", "", text) for text in config[key])
        assert all(text.startswith("RAY_AUTH_MODE=token ") for text in config[key])  # Ray listens everywhere
        parse_ours(shlex.split(stop))
        assert parse_ours(shlex.split(start.replace("$RAY_HEAD_IP", "10.0.0.1")))["labels_file"] == "/etc/shoal/labels.yaml"
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(dict(config) | {"worker_start_ray_command": []}))


def test_the_heads_settings_fit_rays_cluster_file() -> None:
    cluster = yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text())
    config = ServeConfig.from_mapping(read_yaml(INFRA / "ray" / "serve.yaml"))
    assert config.ray_address == f"{cluster['provider']['head_ip']}:6379" and config.pool_labels and config.worker_host == "node"
    assert config.prefill_workers + config.decode_workers == 1 + cluster["max_workers"]
    assert Address.parse(config.controller_listen).host == cluster["provider"]["head_ip"]


def commands(unit: Path) -> list[list[str]]:
    lines = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
    return [
        shlex.split(line.replace("${SHOAL_CONTROLLER}", "10.0.0.1:50050").replace("${", "").replace("}", "")) for line in lines
    ]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_what_there_is(unit: Path) -> None:
    [words] = commands(unit)
    assert words[0].startswith("/opt/shoal/bin/")
    parse_ours(words)
    text = unit.read_text()
    assert "User=shoal" in text and "NoNewPrivileges=yes" in text and "CapabilityBoundingSet=\n" in text
    assert int(re.findall(r"TimeoutStopSec=(\d+)", text)[0]) > 3 * ServeConfig().grace_s  # a drain is longer than that never


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_reads_the_units(tmp_path: Path) -> None:
    here = Path(sys.executable).parent  # programs must exist
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/shoal/bin/", f"{here}/"))
    command = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.glob("*.service")))]
    environment = os.environ | {"SYSTEMD_LOG_LEVEL": "warning"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    ours = [line for line in ended.stderr.splitlines() if "shoal" in line]
    assert ended.returncode == 0 and not ours, ended.stderr


def test_the_compose_file_is_one() -> None:
    compose_spec = pytest.importorskip("compose_spec")
    folder = INFRA / "compose"
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (folder / "compose.yaml").read_text())  # as compose fills in defaults
    assert compose_spec.PyCompose.from_yaml(text).service_names() == ["shoal", "prometheus", "grafana"]
    with pytest.raises(ValueError, match="imagee"):
        compose_spec.PyCompose.from_yaml("services: {a: {imagee: x}}")
    services = yaml.safe_load(text)["services"]
    assert parse_ours(services["shoal"]["command"])["config_file"] == Path("/etc/shoal/serve.yaml")
    assert parse_ours(services["shoal"]["healthcheck"]["test"][1:])
    for name, service in services.items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w-]*", service["image"]), f"{name}: pin the image"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), "nothing leaves this machine"
        files = [volume.split(":")[0] for volume in service.get("volumes", ()) if volume.startswith(".")]
        assert all((folder / file).exists() for file in files)


def test_what_compose_serves_is_what_prometheus_scrapes() -> None:
    config = ServeConfig.from_mapping(read_yaml(INFRA / "compose" / "serve.yaml"))
    scraping = yaml.safe_load((INFRA / "compose" / "prometheus.yaml").read_text())
    targets = [target for job in scraping["scrape_configs"] for each in job["static_configs"] for target in each["targets"]]
    assert targets == list(config.metrics_addresses.values())
    ports = {config.listen_address[1], config.http_address[1]} if config.http_address else set()
    published = yaml.safe_load((INFRA / "compose" / "compose.yaml").read_text())["services"]["shoal"]["ports"]
    assert ports < {int(port.rpartition(":")[2]) for port in published}
    assert json.loads((INFRA / "dashboards" / "shoal.json").read_text())["title"] == "Shoal"
