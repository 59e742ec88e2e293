"""The controller's process: `python -m shoal.launch.controller`. Wires configuration, Ray, signals and the events pipe together.

Standard output carries events, one JSON object a line; everything else, Ray's own output too, goes to standard error.
It ends, stopping its workers, on SIGTERM, SIGINT, or when its standard input closes with --watch-stdin (its parent died).
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from shoal.config.logs import configure_logging
from shoal.config.reading import read_yaml
from shoal.config.serve import ServeConfig
from shoal.controller.controller import Controller
from shoal.controller.events import EventWriter
from shoal.controller.guardian import guard
from shoal.controller.ray_cluster import RayCluster, new_ray_folder
from shoal.errors import InvalidConfig, ShoalError
from shoal.launch.autoscaling import machines_of, service_of
from shoal.rpc import Address, serve_metrics


@click.command()
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file with the keys of `shoal serve`.")
@click.option("--config-text", help="The same as JSON.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Where routers watch endpoints.")
@click.option("--health-listen", default="", metavar="HOST:PORT", help="gRPC health alone, without TLS, for probes.")
@click.option("--ray-node", default="", metavar="HOST", help="Join Ray as a node without CPUs, at this address of ours.")
@click.option("--metrics-listen", default="", help="host:port of this process's /metrics; off when empty.")
@click.option("--watch-stdin", is_flag=True, help="Stop when standard input closes.")
def main(
    config_file: Path | None,
    config_text: str | None,
    listen: str,
    health_listen: str,
    ray_node: str,
    metrics_listen: str,
    watch_stdin: bool,
) -> None:
    """Start and keep the pools of workers, and publish them to routers."""
    events = EventWriter(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # Ray prints to standard output at will
    try:
        values = json.loads(config_text) if config_text else read_yaml(config_file) if config_file else {}
        config = ServeConfig.from_mapping(values)
        configure_logging(config.log_level, "controller", config.log_format)
        if ray_node and not config.ray_address:
            raise InvalidConfig("--ray-node joins a Ray that runs elsewhere; give its ray_address, too")
        if ray_node or not config.ray_address:
            guard()  # a Ray of our own, or a node of it, must not outlive us
        places = Places(Address.parse(listen), health_listen, metrics_listen, ray_node)
        serve(config, places, events, watch_stdin=watch_stdin)
    except ShoalError as error:
        events.emit("failed", message=str(error))
        print(f"controller: {error}", file=sys.stderr)
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a controller is found; "": not offered."""

    listen: Address
    health_listen: str = ""
    metrics_listen: str = ""
    ray_node: str = ""  # the host of a Ray node of our own


def serve(config: ServeConfig, places: Places, events: EventWriter, *, watch_stdin: bool) -> None:
    """Run a controller until it is told to stop. Raises ShoalError when it cannot start or a pool cannot be filled."""
    metrics = serve_metrics(Address.parse(places.metrics_listen), config.cluster) if places.metrics_listen else None
    machines, service = machines_of(config), service_of(config)
    folder = None if config.ray_address else new_ray_folder()
    # told before Ray starts: whoever ends us meanwhile takes it away
    events.emit("ray", message="starting" if folder else f"joining {config.ray_address}", ray_folder=str(folder or ""))
    cluster = RayCluster.start(
        config.ray_address, config.ray_namespace, folder=folder, node_host=places.ray_node, wait_s=config.start_timeout_s
    )
    try:
        controller = partial(Controller, config, cluster, events, machines=machines, service=service)
        asyncio.run(_run(controller, config, places, events, watch_stdin=watch_stdin))
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):  # the loop's handlers are gone; another order to stop changes nothing
            signal.signal(signum, signal.SIG_IGN)
        cluster.shutdown()
        if metrics is not None:
            metrics.close()


async def _run(
    make: Callable[[], Controller], config: ServeConfig, places: Places, events: EventWriter, *, watch_stdin: bool
) -> None:
    controller = make()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    if watch_stdin:
        loop.add_reader(0, lambda: stop.set() if not os.read(0, 4096) else None)
    beats = asyncio.create_task(events.beat(config.beat_s)) if watch_stdin else None
    await controller.start(places.listen, places.health_listen)
    try:
        await controller.run(stop)
    finally:
        if beats is not None:
            beats.cancel()  # stopping has a limit of its own
        if watch_stdin:
            loop.remove_reader(0)
        await controller.stop()


if __name__ == "__main__":
    main()
