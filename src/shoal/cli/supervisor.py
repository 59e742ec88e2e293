"""Runs a whole cluster as child processes: one controller (which runs Ray and the workers) and routers.

Knows commands, readiness and restarts; loads no model, no torch and no Ray.

    controller listens ─▶ routers start ─▶ all workers ready and routers SERVING ─▶ ready
    router dies, or hangs ─▶ started again, declared
    controller dies, or hangs ─▶ the same where Ray is external. Where Ray is its own, its death is the cluster's, and that it
                                 hangs is only said: killed, it would take workers along that go on serving
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cli.children import Child
from shoal.cli.cluster_secret import kept_secret, new_secret
from shoal.cli.commands import RouterPlace, controller_arguments, router_arguments, router_places
from shoal.cli.leftovers import SECRET_PREFIX, sweep_leftovers
from shoal.cli.preflight import free_port
from shoal.cli.services import Published, Service
from shoal.cli.watchdog import Watchdog
from shoal.config.serve import ServeConfig
from shoal.controller.descendants import adopt_orphans, end_descendants
from shoal.controller.events import BEAT as CONTROLLER_BEAT
from shoal.controller.events import Event
from shoal.controller.owner import FOLDER_MARK, mark
from shoal.errors import ShoalError, Unavailable
from shoal.router.main import BEAT, SERVING

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
        self.routers = router_places(config)
        first = self.routers[0]
        self.config = config = replace(config, listen=first.listen, http_listen=first.http_listen)
        self._listeners = listeners
        # kept when the controller is started again
        self._controller_address = config.controller_listen or f"{config.own_host}:{free_port(config.own_host)}"
        self._listening = asyncio.Event()
        self._all_ready = asyncio.Event()
        self._serving = {place.name: asyncio.Event() for place in self.routers}
        self._published: Published | None = None
        self._crashed = False  # the controller, by itself, or its Ray did not start: its logs may tell why
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
        for path in sweep_leftovers():
            self._listeners.on_log(f"deleted {path}, left by a `shoal serve` that was killed")
        self._make_secret()
        self._keepers.append(asyncio.create_task(self._keep("controller", restart=bool(self.config.ray_address))))
        await self._unless_failed(self._listening.wait())
        self._publish()
        for place in self.routers:
            self._keepers.append(asyncio.create_task(self._keep(place.name, restart=True, place=place)))
        await self._unless_failed(self._all_ready.wait())
        for serving in self._serving.values():
            await self._unless_failed(serving.wait())

    async def wait(self) -> None:
        """Return never; raises ClusterFailed when the cluster cannot go on."""
        await self._unless_failed(asyncio.Event().wait())

    async def stop(self) -> list[str]:
        """Drain the routers, then stop the workers; returns the names of processes that had to be killed."""
        self._stopping = True
        if self._published is not None:
            self._published.withdraw()
        grace_s, children = self.config.grace_s, self._children
        await asyncio.gather(*(child.stop(grace_s + 5) for name, child in children.items() if name != "controller"))
        if "controller" in children:
            await children["controller"].stop(2 * grace_s + 15)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        leftover = await asyncio.to_thread(end_descendants)
        if self._secret_folder is not None:
            self._secret_folder.cleanup()
        if self._ray_folder and not self._crashed:
            shutil.rmtree(self._ray_folder, ignore_errors=True)  # what a controller that was killed on order could not do
        return leftover

    def kill(self) -> None:
        """End every process now, without draining."""
        for child in self._children.values():
            child.kill()

    async def _keep(self, name: str, *, restart: bool, place: RouterPlace | None = None) -> None:
        """Run the controller, or the router of a place, until stopped; start it again when that helps. Raises ClusterFailed."""
        loop, num_quick, num_restarts = asyncio.get_running_loop(), 0, 0
        while True:
            started_at = loop.time()
            last_words: list[str] = []

            def on_log(line: str, last_words: list[str] = last_words) -> None:
                last_words[:] = [*last_words[-4:], line]
                self._listeners.on_log(line)

            watchdog = Watchdog(self.config.hang_timeout_s)

            def on_output(line: str, watchdog: Watchdog = watchdog) -> None:
                if line in (BEAT, CONTROLLER_BEAT):
                    watchdog.heard()
                elif line == SERVING:
                    self._serving[name].set()
                else:
                    self._on_output(line)

            arguments = (
                controller_arguments(self.config, self._controller_address)
                if place is None
                else router_arguments(self.config, place, self._controller_address)
            )
            child = await Child.spawn(name, arguments, on_output=on_output, on_log=on_log)
            self._children[name] = child
            status, hung = await self._until_end(child, watchdog, kills=restart)
            if self._stopping:
                return
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            if hung:
                how = f"did not move for {self.config.hang_timeout_s:g} s and was killed"
            num_quick = num_quick + 1 if loop.time() - started_at < _QUICK_S else 1
            if not restart or self._failure or num_quick > _MAX_QUICK_RESTARTS or not self._all_ready.is_set():
                words = f": {' | '.join(last_words[-2:])}" if last_words and status > 0 else ""
                in_order = self._failure and self._listening.is_set()
                self._crashed = self._crashed or (place is None and not in_order)
                logs = f" (Ray's logs are in {self._ray_folder})" if self._ray_folder and place is None else ""
                raise ClusterFailed(self._failure or f"the {name} {how}{words}{logs}")
            num_restarts += 1
            times = f" (for the {num_restarts}. time)" if num_restarts > 1 else ""
            self._listeners.on_event(Event("restarting", name, f"the {name} {how}; starting it again{times}"))
            await asyncio.sleep(_RESTART_DELAY_S * num_quick)

    async def _until_end(self, child: Child, watchdog: Watchdog, *, kills: bool) -> tuple[int, bool]:
        """Wait for a child's end, and where `kills` bring it about when it has fallen silent; its status, and whether we did."""
        ending = asyncio.create_task(child.wait())
        try:
            while not await _ends_before(ending, watchdog.silence()):
                if kills:
                    child.kill()
                    return await ending, True
                self._tell_hung(child.name)
                if not await _ends_before(ending, watchdog.word()):
                    self._listeners.on_event(Event("moving", child.name, f"the {child.name} moves again"))
            return await ending, False
        finally:
            ending.cancel()

    def _tell_hung(self, name: str) -> None:
        how = f"the {name} has not moved for {self.config.hang_timeout_s:g} s"
        what = "requests go on, but no worker that dies is replaced until it moves; if it stays so, start `shoal serve` again"
        self._listeners.on_event(Event("hung", name, f"{how}: {what}"))

    def _publish(self) -> None:
        """Let `shoal scale` find us. Where that cannot be written, it needs the controller's address, and serving goes on."""
        service = Service(tuple(place.listen for place in self.routers), self._controller_address, self.config.cluster)
        try:
            self._published = service.publish()
        except (OSError, ShoalError) as error:
            self._listeners.on_log(f"`shoal scale` will need --controller {self._controller_address}: {error}")

    def _make_secret(self) -> None:
        """Unless one is given: a file of this run; where workers may outlive it, one that later runs find again."""
        config = self.config
        if config.cluster_secret_file:
            return
        if config.ray_address:
            path = kept_secret(config.ray_namespace)
        else:
            self._secret_folder = tempfile.TemporaryDirectory(prefix=SECRET_PREFIX)
            mark(Path(self._secret_folder.name) / FOLDER_MARK)
            path = new_secret(Path(self._secret_folder.name) / "cluster-secret")
        self.config = replace(config, cluster_secret_file=str(path))

    def _on_output(self, line: str) -> None:
        try:
            event = Event.decode(line)
        except ValueError:
            self._listeners.on_log(line)
            return
        if event.kind == "listening":
            self._listening.set()
        elif event.kind == "ray":
            self._ray_folder = str(event.data.get("ray_folder", ""))
        elif event.kind == "all-ready":
            self._all_ready.set()
        elif event.kind == "failed" and event.data.get("fatal", True):
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


async def _ends_before(ending: "asyncio.Task[int]", other: Coroutine[Any, Any, None]) -> bool:
    """Whether a child ends before something else happens."""
    task = asyncio.create_task(other)
    await asyncio.wait((ending, task), return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    return ending.done()
