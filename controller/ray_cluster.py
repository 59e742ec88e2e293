"""The only module that calls Ray: starts or joins a cluster, makes actors, finds them again. Knows no lifecycle policy."""

import json
import logging
import os
import secrets
import shutil
import signal
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

import shoal
from shoal.config.logs import FORMAT_VARIABLE, LEVEL_VARIABLE
from shoal.config.worker import Pool, WorkerConfig
from shoal.controller.descendants import adopt_orphans, end_descendants
from shoal.controller.names import ActorName, ActorResources
from shoal.controller.owner import FOLDER_MARK, RAY_PREFIX, SHORT_FOLDER, mark
from shoal.controller.ray_node import OBJECT_STORE_BYTES, OwnNode
from shoal.decode_worker.actor import DecodeActor
from shoal.errors import Unavailable
from shoal.pb.internal.v1 import worker_pb2
from shoal.prefill_worker.actor import PrefillActor
from shoal.rpc.hosted import process_host

_log = logging.getLogger(__name__)

_UNLIMITED = 1 << 30
_MAX_CALLS = 100  # per actor at once: lifelines of several controllers, start, describe, stop


def actor_environment(num_threads: int, transfer_backend: str, log_level: str, log_format: str) -> dict[str, str]:
    """Environment of a worker's process, set before it imports torch."""
    environment = {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        LEVEL_VARIABLE: log_level,
        FORMAT_VARIABLE: log_format,
    }
    root = Path(shoal.__file__).resolve().parents[1]
    if root != Path(sysconfig.get_paths()["purelib"]).resolve():  # run from a checkout
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    environment |= {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
    if "SHOAL_FAULTS" in os.environ:
        environment["SHOAL_FAULTS"] = os.environ["SHOAL_FAULTS"]
    if transfer_backend == "nccl":
        environment |= {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # a dead peer must not take the survivor down
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "NCCL_MAX_NCHANNELS": "4",
        }
    return environment


class ActorHandle:
    """One actor as the controller sees it. Calls raise Unavailable when the actor is gone."""

    def __init__(self, ray: Any, handle: Any, name: ActorName) -> None:
        self._ray = ray
        self._handle = handle
        self.name = name
        self.machine = ""  # where it runs, once it has told
        self._process: int | None = None  # a pidfd, which unlike a pid is never reused; only for an actor on this machine

    async def start(self) -> AsyncIterator[dict[str, Any]]:
        """Start the worker inside; yields what HostedWorker.start does, parsed."""
        stream = self._handle.start.options(num_returns="streaming").remote()
        try:
            async for reference in stream:
                yield self._learn(json.loads(await reference))
        except self._ray.exceptions.RayError as error:
            raise Unavailable(_words(error)) from error

    async def describe(self) -> dict[str, Any]:
        """What a ready actor says of itself; {} when it is not ready."""
        try:
            return self._learn(json.loads(await self._handle.describe.remote()))
        except self._ray.exceptions.RayError as error:
            raise Unavailable(_words(error)) from error

    async def prewarm(self, decode: worker_pb2.WorkerDescription) -> None:
        """Have a prefill worker connect to a decode worker."""
        try:
            await self._handle.prewarm.remote(decode.SerializeToString())
        except self._ray.exceptions.RayError as error:
            raise Unavailable(_words(error)) from error

    async def wait_for_death(self) -> str:
        """Return, within milliseconds of the actor's death, its cause in words."""
        try:
            await self._handle.lifeline.remote()
        except self._ray.exceptions.RayError as error:
            return _words(error)
        return "its lifeline ended"

    async def stop(self, grace_s: float) -> None:
        """Let the worker drain and stop; its process stays until `kill`."""
        try:
            await self._handle.stop.remote(grace_s)
        except self._ray.exceptions.RayError as error:
            raise Unavailable(_words(error)) from error

    def kill(self) -> None:
        """End the process for certain, also when it is stopped or hung (Ray's own kill asks the process politely)."""
        self._ray.kill(self._handle, no_restart=True)
        if self._process is not None:
            process, self._process = self._process, None
            try:
                signal.pidfd_send_signal(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
            finally:
                os.close(process)

    def _learn(self, told: dict[str, Any]) -> dict[str, Any]:
        self.machine = str(told.get("machine", self.machine))
        if "pid" in told and told["host"] == process_host() and self._process is None and hasattr(os, "pidfd_open"):
            try:
                self._process = os.pidfd_open(told["pid"])
            except ProcessLookupError:
                _log.info("%s died as it became ready", self.name)
        return told


def new_ray_folder() -> Path:
    """A folder for a local Ray's sockets and logs, marked as this process's."""
    folder = Path(tempfile.mkdtemp(prefix=RAY_PREFIX, dir=SHORT_FOLDER))
    mark(folder / FOLDER_MARK)
    return folder


class RayCluster:
    """A running Ray that this process drives. Make it in the main thread: Ray's daemons die with the thread that made them."""

    def __init__(self, ray: Any, namespace: str, folder: Path | None, node: OwnNode | None = None) -> None:
        self._ray = ray
        self._node = node  # that we brought to a Ray of others
        self._namespace = namespace
        self.folder = folder  # Ray's sockets and logs, when it was started here
        self._classes: Mapping[Pool, Any] = {Pool.PREFILL: ray.remote(PrefillActor), Pool.DECODE: ray.remote(DecodeActor)}

    @classmethod
    def start(
        cls, address: str, namespace: str, *, folder: Path | None = None, node_host: str = "", wait_s: float = 60.0
    ) -> Self:
        """Join the Ray at `address`, or start a local one in `folder` with tokens on, no dashboard and little memory.

        `node_host`: an address of this machine; join as a node of our own there, and wait so long for the head to come.
        """
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not address:
            adopt_orphans()
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves workers beside any other program
            os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # idle workers that no actor of ours would use
        import ray  # here, not above: the environment must be set first

        node = OwnNode.join(address, node_host, wait_s) if address and node_host else None
        options: dict[str, Any] = {"namespace": namespace, "logging_level": logging.WARNING, "log_to_driver": True}
        try:
            if address:
                ray.init(address=address, **options, **({"_node_ip_address": node_host} if node_host else {}))
            else:
                ray.init(
                    address="local",
                    num_cpus=1,  # our actors ask for none: see controller/room.py
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    _temp_dir=str(folder),
                    **options,
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"join the Ray cluster at {address}" if address else "start a local Ray"
            raise Unavailable(f"cannot {where}: {(node.end if node else '') or _words(error)}") from error
        return cls(ray, namespace, folder, node)

    def spawn(
        self, name: ActorName, config: WorkerConfig, resources: ActorResources, environment: Mapping[str, str]
    ) -> ActorHandle:
        """Make a detached actor; it starts nothing until `ActorHandle.start`."""
        options: dict[str, Any] = {
            "name": str(name),
            "namespace": self._namespace,
            "lifetime": "detached",
            "max_restarts": 0,
            "max_concurrency": _MAX_CALLS,
            "num_cpus": resources.num_cpus,
            "num_gpus": resources.num_gpus,
            "runtime_env": {"env_vars": dict(environment)},
        }
        if resources.use_pool_label:
            options["label_selector"] = {"pool": str(name.slot.pool)}
        handle = self._classes[name.slot.pool].options(**options).remote(json.dumps(config.to_dict()))
        return ActorHandle(self._ray, handle, name)

    def find_actors(self) -> list[ActorHandle]:
        """Every live actor of ours, whoever made it."""
        found = []
        for text in self._ray.util.list_named_actors():
            if (name := ActorName.parse(text)) is not None:
                try:
                    found.append(ActorHandle(self._ray, self._ray.get_actor(text, self._namespace), name))
                except ValueError:  # it died in between
                    _log.info("actor %s is gone", text)
        return found

    def num_places(self, resources: ActorResources, pool: Pool | None) -> int:
        """How many more such actors Ray could place now; `pool`: only on nodes with its label."""
        available = self._ray._private.state.available_resources_per_node()
        places = 0
        for node in self._ray.nodes():
            if not node["Alive"] or (pool is not None and node.get("Labels", {}).get("pool") != str(pool)):
                continue
            free = available.get(node["NodeID"], {})
            needs = {"CPU": resources.num_cpus, "GPU": resources.num_gpus}
            places += min((int(free.get(name, 0) // need) for name, need in needs.items() if need), default=_UNLIMITED)
        return places

    def remember(self, key: str, text: str) -> None:
        """Keep a text in Ray's own store, where it lives as long as the detached actors. "" forgets it. Raises Unavailable."""
        from ray.experimental import internal_kv as kv

        try:
            if text:
                kv._internal_kv_put(key, text, overwrite=True, namespace=self._namespace)
            else:
                kv._internal_kv_del(key, namespace=self._namespace)
        except (self._ray.exceptions.RayError, RuntimeError) as error:
            raise Unavailable(f"Ray's store does not take {key!r}: {_words(error)}") from error

    def recall(self, key: str) -> str:
        """What was remembered last; "" when nothing was."""
        from ray.experimental import internal_kv as kv

        text: bytes | None = kv._internal_kv_get(key, namespace=self._namespace)
        return (text or b"").decode()

    def shutdown(self) -> None:
        """Leave; a Ray that was started here ends, with every process of it, and its files go."""
        self._ray.shutdown()
        if self._node is not None:
            self._node.leave()
            end_descendants()  # it brings agents and a raylet
        if self.folder is not None:
            end_descendants()  # agents, which outlive a raylet that had to be killed by many seconds
            shutil.rmtree(self.folder, ignore_errors=True)


def _words(error: BaseException) -> str:
    """The telling lines of Ray's long texts, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "dead because" in line or "low on memory" in line or "Error" in line.split(":")[0]]
    text = " ".join((telling or lines or [type(error).__name__])[-1].split())
    return text.split(" Some common causes")[0][:400]
