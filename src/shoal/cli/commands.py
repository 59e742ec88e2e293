"""The command lines of a cluster's processes. Knows flags of router and controller; starts nothing."""

import json
from dataclasses import asdict, dataclass

from shoal.cli.preflight import free_port
from shoal.config.serve import ServeConfig

_DOOR_FILES = (
    "tls_cert",
    "tls_key",
    "tls_ca",
    "tokens_file",
    "cluster_secret_file",
    "cluster_tls_cert",
    "cluster_tls_key",
    "cluster_tls_ca",
)


@dataclass(frozen=True, slots=True)
class RouterPlace:
    """One router and its doors."""

    name: str
    listen: str
    http_listen: str


def router_places(config: ServeConfig) -> tuple[RouterPlace, ...]:
    """Each router on the port after the one before; where the first is to be free, each on any free one."""

    def door(address: tuple[str, int] | None, index: int) -> str:
        if address is None:
            return ""
        host, port = address
        return f"{host}:{port + index if port else free_port(host)}"

    return tuple(
        RouterPlace(name, door(config.listen_address, index), door(config.http_address, index))
        for index, name in enumerate(config.router_names)
    )


def controller_arguments(config: ServeConfig, listen: str) -> list[str]:
    """`python …` of the controller."""
    arguments = ["-m", "shoal.launch.controller", "--watch-stdin", "--listen", listen]
    arguments += ["--config-text", json.dumps(config.to_mapping())]
    metrics = config.metrics_addresses.get("controller")
    return arguments + (["--metrics-listen", metrics] if metrics else [])


def router_arguments(config: ServeConfig, place: RouterPlace, controller: str) -> list[str]:
    """`python …` of a router."""
    arguments = ["-m", "shoal.router", "--name", place.name, "--listen", place.listen, "--controller", controller]
    arguments += ["--model", config.model, "--visibilities", ",".join(config.visibilities)]
    arguments += ["--max-boundary-tokens", str(config.max_boundary_tokens)]
    arguments += ["--local-prefill-tokens", str(config.local_prefill_tokens)]
    arguments += ["--local-cached-share", str(config.local_cached_share)]
    arguments += ["--prefill-fallback"] if config.prefill_fallback else []
    for name, value in asdict(config.shadow).items():
        arguments += [f"--shadow-{name.replace('_', '-')}", str(value)]
    for name, value in asdict(config.images).items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    arguments += ["--max-context", str(config.max_context_tokens)] if config.max_context_tokens else []
    arguments += ["--max-wait-s", str(config.max_wait_s)]
    arguments += ["--drain-s", str(config.grace_s), "--log-level", config.log_level]
    arguments += ["--log-format", config.log_format, "--beat-s", str(config.beat_s)]
    metrics = config.metrics_addresses.get(place.name)
    arguments += ["--metrics", metrics] if metrics else []
    if place.http_listen:
        arguments += ["--http-listen", place.http_listen, "--http-max-body-mb", str(config.http_max_body_mb)]
    for field in _DOOR_FILES:
        arguments += [f"--{field.replace('_', '-')}", value] if (value := getattr(config, field)) else []
    arguments += ["--tls-require-client-cert"] if config.tls_require_client_cert else []
    return arguments + (["--allow-wildcard"] if config.allow_wildcard else [])
