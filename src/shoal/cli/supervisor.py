"""Runs a whole cluster as child processes: one controller (which runs Ray and the workers) and one router.

Knows commands, readiness and restarts; loads no model, no torch and no Ray.

    controller listens ─▶ router starts ─▶ all workers ready and router SERVING ─▶ ready
    router dies ─▶ started again, declared · controller dies ─▶ started again when Ray is external, else the cluster has failed
"""

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cli.children import Child
from shoal.cli.cluster_secret import kept_secret, new_secret
from shoal.cli.preflight import free_port
from shoal.config.serve import ServeConfig
from shoal.controller.descendants import adopt_orphans, end_descendants
from shoal.controller.events import Event
from shoal.errors import ShoalError, Unavailable
from shoal.router.main import SERVING

_RESTART_DELAY_S = 0.5
_MAX_QUICK_RESTARTS = 5  # of one child within _QUICK_S each: then the cluster has failed
_QUICK_S = 10.0


class ClusterFailed(ShoalError):
    """The cluster cannot start or go on; the text says why."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Where a supervisor's news go. Called on its event loop."""

    on_event: Callable[[Event], None]
    on_log: Callable[[str], None]


class Supervisor:
    """`start`, then `wait`, then always `stop`. One per process, in the main thread."""

    def __init__(self, config: ServeConfig, listeners: Listeners) -> None:
        host, port = config.listen_address
        if port == 0:
            config = replace(config, listen=f"{host}:{free_port(host)}")
        if config.http_address is not None and config.http_address[1] == 0:
            host = config.http_address[0]
            config = replace(config, http_listen=f"{host}:{free_port(host)}")
        self.config = config
        self._listeners = listeners
        self._controller_address = f"{config.worker_host}:{free_port(config.worker_host)}"  # kept when it is started again
        self._listening = asyncio.Event()
        self._all_ready = asyncio.Event()
        self._router_serving = asyncio.Event()
        self._secret_folder: tempfile.TemporaryDirectory[str] | None = None
        self._failure = ""
        self._ray_folder = ""  # logs of a local Ray, which stay when it does not end in order
        self._children: dict[str, Child] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self.config.listen

    async def start(self) -> None:
        """Start everything and return once requests can be served. Raises ClusterFailed with words."""
        adopt_orphans()
        self._make_secret()
        self._keepers.append(asyncio.create_task(self._keep("controller", restart=bool(self.config.ray_address))))
        await self._unless_failed(self._listening.wait())
        self._keepers.append(asyncio.create_task(self._keep("router", restart=True)))
        await self._unless_failed(self._all_ready.wait())
        await self._unless_failed(self._router_serving.wait())

    async def wait(self) -> None:
        """Return never; raises ClusterFailed when the cluster cannot go on."""
        await self._unless_failed(asyncio.Event().wait())

    async def stop(self) -> list[str]:
        """Drain the router, then stop the workers; returns the names of processes that had to be killed."""
        self._stopping = True
        grace_s = self.config.grace_s
        for name, timeout_s in (("router", grace_s + 5), ("controller", 2 * grace_s + 15)):
            if name in self._children:
                await self._children[name].stop(timeout_s)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        leftover = await asyncio.to_thread(end_descendants)
        if self._secret_folder is not None:
            self._secret_folder.cleanup()
        return leftover

    def kill(self) -> None:
        """End every process now, without draining."""
        for child in self._children.values():
            child.kill()

    def _arguments(self, name: str) -> list[str]:
        config, metrics = self.config, self.config.metrics_addresses.get(name)
        if name == "controller":
            arguments = ["-m", "shoal.launch.controller", "--watch-stdin", "--listen", self._controller_address]
            arguments += ["--config-text", json.dumps(config.to_mapping())]
            return arguments + (["--metrics-listen", metrics] if metrics else [])
        arguments = ["-m", "shoal.router", "--listen", config.listen, "--controller", self._controller_address]
        arguments += ["--model", config.model, "--visibilities", ",".join(config.visibilities)]
        arguments += ["--max-boundary-tokens", str(config.max_boundary_tokens)]
        arguments += ["--max-context", str(config.max_context_tokens)] if config.max_context_tokens else []
        arguments += ["--drain-s", str(config.grace_s), "--log-level", config.log_level]
        arguments += ["--log-format", config.log_format]
        arguments += ["--metrics", metrics] if metrics else []
        arguments += ["--http-listen", config.http_listen] if config.http_listen else []
        for field in (
            "tls_cert",
            "tls_key",
            "tls_ca",
            "tokens_file",
            "cluster_secret_file",
            "cluster_tls_cert",
            "cluster_tls_key",
            "cluster_tls_ca",
        ):
            arguments += [f"--{field.replace('_', '-')}", value] if (value := getattr(config, field)) else []
        arguments += ["--tls-require-client-cert"] if config.tls_require_client_cert else []
        return arguments + (["--allow-wildcard"] if config.allow_wildcard else [])

    async def _keep(self, name: str, *, restart: bool) -> None:
        """Run a child until stopped; start it again when that helps. Raises ClusterFailed."""
        loop, num_quick = asyncio.get_running_loop(), 0
        while True:
            started_at = loop.time()
            last_words: list[str] = []

            def on_log(line: str, last_words: list[str] = last_words) -> None:
                last_words[:] = [*last_words[-4:], line]
                self._listeners.on_log(line)

            child = await Child.spawn(name, self._arguments(name), on_output=self._on_output, on_log=on_log)
            self._children[name] = child
            status = await child.wait()
            if self._stopping:
                return
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            num_quick = num_quick + 1 if loop.time() - started_at < _QUICK_S else 1
            if not restart or self._failure or num_quick > _MAX_QUICK_RESTARTS or not self._all_ready.is_set():
                words = f": {' | '.join(last_words[-2:])}" if last_words and status > 0 else ""
                logs = f" (Ray's logs are in {self._ray_folder})" if self._ray_folder and name == "controller" else ""
                raise ClusterFailed(self._failure or f"the {name} {how}{words}{logs}")
            self._listeners.on_event(Event("restarting", name, f"the {name} {how}; starting it again"))
            await asyncio.sleep(_RESTART_DELAY_S * num_quick)

    def _make_secret(self) -> None:
        """Unless one is given: a file of this run; where workers may outlive it, one that later runs find again."""
        config = self.config
        if config.cluster_secret_file:
            return
        if config.ray_address:
            path = kept_secret(config.ray_namespace)
        else:
            self._secret_folder = tempfile.TemporaryDirectory(prefix="shoal-secret-")
            path = new_secret(Path(self._secret_folder.name) / "cluster-secret")
        self.config = replace(config, cluster_secret_file=str(path))

    def _on_output(self, line: str) -> None:
        if line == SERVING:
            self._router_serving.set()
            return
        try:
            event = Event.decode(line)
        except ValueError:
            self._listeners.on_log(line)
            return
        if event.kind == "listening":
            self._listening.set()
            self._ray_folder = str(event.data.get("ray_folder", ""))
        elif event.kind == "all-ready":
            self._all_ready.set()
        elif event.kind == "failed":
            self._failure = event.message
        self._listeners.on_event(event)

    async def _unless_failed(self, work: Any) -> None:
        """Await `work`; a child that fails first ends it. Raises ClusterFailed."""
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait((task, *self._keepers), return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()  # without effect on one that is done
        for keeper in self._keepers:
            if keeper in done and not keeper.cancelled() and (error := keeper.exception()) is not None:
                raise error if isinstance(error, ClusterFailed) else Unavailable(str(error)) from error
        if task in done:
            task.result()
