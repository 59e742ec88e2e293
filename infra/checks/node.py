"""One Linux machine that plays kubelet: rendered pods as processes, each in a network namespace. Knows manifests; judges nothing.

As far as that goes without Kubernetes: addresses, host names, Secrets and ConfigMaps as files of their modes, user 10001, a
private /tmp and process table, the very commands and environment. `ray start` is what KubeRay makes of a group's parameters.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from infra.checks.charts import Object, PodPlace, pods
from tests.certificates import Authority

NET: Final = "10.97.3"
ORDER: Final = ("ray-head", "controller", "prefill", "decode", "router", "test")
USER: Final = 10001
MOUNTS: Final = Path("/etc/shoal")
NAMES: Final = {"ray-head": "shoal-head-svc.shoal.svc", "controller": "shoal-controller", "router": "shoal-router.shoal.svc"}
RAY_START: Final = ("ray", "start", "--block", "--dashboard-agent-listen-port=52365", "--metrics-export-port=8080")
UNSHARE: Final = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
POD: Final = """set -e
mount --make-rprivate /
mkdir -p {root}/python {root}/venv
mount --bind {base} {root}/python; mount --bind {venv} {root}/venv; mount --bind {root}/mounts {root}/mounts
mount -t tmpfs -o mode=755 none {top}; mkdir -p {base}; mount --bind {root}/python {base}
mount --bind {hosts} /etc/hosts
mount -t tmpfs -o mode=1777 none /tmp; mkdir -p {venv}; mount --bind {root}/venv {venv}
mount -t tmpfs -o mode=755 none /etc/shoal; mount -t tmpfs -o mode=1777 none /dev/shm
{mounts}
. {root}/environment; cd /tmp
exec setpriv --reuid={user} --regid={user} --clear-groups --no-new-privs --bounding-set=-all "$@"
"""


class Node:
    """`up`, then ask, then `down`. Raises TimeoutError when a Ray node does not start, CalledProcessError without rights."""

    def __init__(self, folder: Path, manifests: tuple[Object, ...], venvs: dict[str, Path]) -> None:
        self.folder, self._manifests, self._venvs = folder, manifests, venvs
        self.places: dict[str, PodPlace] = {place.component: place for place in pods(manifests)}
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.flows: set[tuple[str, str, int]] = set()  # who connected to whom, at which port
        self._ended = threading.Event()
        self._made_mounts = False
        self._token = secrets.token_hex(32)
        authority = Authority(folder)
        door = authority.issue("door", names=f"DNS:{NAMES['router']}")
        member = authority.issue("member", names="DNS:shoal-cluster")
        ca = authority.ca.read_text()
        self._secrets = {
            "door": {"tls.crt": door.certificate.read_text(), "tls.key": door.key.read_text(), "ca.crt": ca},
            "members": {"tls.crt": member.certificate.read_text(), "tls.key": member.key.read_text(), "ca.crt": ca},
            "shoal-cluster-secret": {"secret": secrets.token_hex(32)},
            "shoal": {"auth_token": self._token},
        }
        self._maps = {item["metadata"]["name"]: item["data"] for item in manifests if item["kind"] == "ConfigMap"}

    def address(self, component: str) -> str:
        """A pod's own."""
        return f"{NET}.{10 + ORDER.index(component)}"

    def up(self) -> None:
        """Namespaces on one bridge, then the pods, one Ray node after the other: two at once start slowly on a small machine."""
        self.down()
        self._ended.clear()
        self._made_mounts = not MOUNTS.exists()
        MOUNTS.mkdir(exist_ok=True)  # where each pod mounts a file system of its own
        _ip("netns add shoal-hub", "-n shoal-hub link add br0 type bridge", "-n shoal-hub link set br0 up")
        hosts = "127.0.0.1 localhost\n" + "".join(f"{self.address(c)} {name}\n" for c, name in NAMES.items())
        for component in ORDER:
            inside = f"-n shoal-{component}"
            _ip(
                f"netns add shoal-{component}",
                f"{inside} link add eth0 type veth peer name {component} netns shoal-hub",
                f"-n shoal-hub link set {component} master br0 up",
                f"{inside} addr add {self.address(component)}/24 dev eth0",
                f"{inside} link set eth0 up",
                f"{inside} link set lo up",
                f"{inside} route add default via {NET}.1",
            )
            (self.folder / f"{component}.hosts").write_text(hosts)
        threading.Thread(target=self._watch, daemon=True).start()
        for component in ORDER[:-1]:
            place = self.places[component]
            self.started[component] = self.run(place, place.spec["containers"][0], self.folder / f"{component}.log")
            if component in ("ray-head", "controller", "prefill"):
                until(partial(self._has_joined, component), 120)

    def run(self, place: PodPlace, container: Object, log: Path) -> "subprocess.Popen[bytes]":
        """Start a container as the kubelet would: its mounts, its user, its environment, its command."""
        component = place.component
        root = self.folder / f"{component}-{container['name']}"
        mounts = "".join(self._mounts(root, place, container))
        venv = self._venvs["router" if "router" in container["image"] else "worker"]
        environment = self._environment(component, container) | {"PATH": f"{venv}/bin:/usr/bin:/bin"}
        (root / "environment").write_text("".join(f"export {key}={value!r}\n" for key, value in environment.items()))
        base = Path(os.path.realpath(venv / "bin" / "python")).parents[1]  # perhaps in a folder that only root may enter
        known = {"root": root, "base": base, "venv": venv, "top": base.parents[-2], "mounts": mounts, "user": USER}
        script = POD.format(hosts=self.folder / f"{component}.hosts", **known)
        command = (*UNSHARE, "env", "-i", "bash", "-c", script, "pod", *self._command(component, container))
        with log.open("wb") as output:
            return subprocess.Popen(_within(component, *command), stdout=output, stderr=subprocess.STDOUT)

    def inside(self, component: str, *command: str) -> "subprocess.CompletedProcess[str]":
        """A command of ours in a pod's network."""
        return subprocess.run(_within(component, *command), capture_output=True, text=True, check=False)

    def terminate(self, component: str) -> tuple[int | None, float, list[int]]:
        """SIGTERM to a pod's first process, as the kubelet sends it: its status, the seconds it took, what processes are left."""
        began, process = time.monotonic(), self.started[component]
        for pid in self._pids(component):
            if Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].splitlines()[0].split()[-1] == "1":
                os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.places[component].spec["terminationGracePeriodSeconds"])
        return process.poll(), time.monotonic() - began, self._pids(component)

    def log(self, component: str) -> str:
        """What a pod has printed."""
        path = self.folder / f"{component}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def down(self) -> None:
        """End whatever runs in our namespaces, and take them away."""
        self._ended.set()
        for pid in [pid for component in ORDER for pid in self._pids(component)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started.values():
            process.wait(10)
        for name in (*ORDER, "hub"):
            subprocess.run(("ip", "netns", "del", f"shoal-{name}"), capture_output=True, check=False)
        if self._made_mounts:
            MOUNTS.rmdir()

    def _has_joined(self, component: str) -> bool:
        return "Ray runtime started" in self.log(component)

    def _command(self, component: str, container: Object) -> list[str]:
        """A container's own, or what KubeRay makes of a group."""
        if "command" in container:
            known = {"$(POD_IP)": self.address(component), "$(POD_NAME)": component}
            arguments = list(container["args"])
            for name, value in known.items():
                arguments = [argument.replace(name, value) for argument in arguments]
            return [*container["command"], *arguments]
        spec = next(item for item in self._manifests if item["kind"] == "RayCluster")["spec"]
        groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]} | {"ray-head": spec["headGroupSpec"]}
        group = groups[component]
        flags = [f"--{key}={value}" for key, value in group["rayStartParams"].items()]
        flags += [f"--labels={key}={value}" for key, value in group.get("labels", {}).items()]
        flags += ["--head", "--port=6379"] if component == "ray-head" else [f"--address={NAMES['ray-head']}:6379"]
        return [*RAY_START, *flags]

    def _environment(self, component: str, container: Object) -> dict[str, str]:
        environment = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment["GRPC_DNS_RESOLVER"] = "native"  # a cluster has a DNS server, we have /etc/hosts
        if "command" not in container:
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}  # by the operator
        fields = {"status.podIP": self.address(component), "metadata.name": component}
        for entry in container.get("env", []):
            source = entry.get("valueFrom", {})
            if "fieldRef" in source:
                value = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                value = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            else:
                value = entry["value"]
            environment[entry["name"]] = value
        return environment

    def _mounts(self, root: Path, place: PodPlace, container: Object) -> Iterator[str]:
        """Lines that mount a container's volumes. Secrets belong to root and to the pod's group, as fsGroup makes them."""
        shutil.rmtree(root, ignore_errors=True)
        (root / "mounts").mkdir(parents=True)
        volumes = {volume["name"]: volume for volume in place.spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "emptyDir" in volume:
                continue  # /tmp and /dev/shm: private already
            source = volume.get("secret", volume.get("configMap"))
            data = self._secrets[source["secretName"]] if "secret" in volume else self._maps[source["name"]]
            kept = {item["key"]: item["path"] for item in source.get("items", [])} or {key: key for key in data}
            target = root / "mounts" / mount["name"]
            target.mkdir()
            for key, name in kept.items():
                (target / name).write_text(data[key])
                os.chown(target / name, 0, USER)
                (target / name).chmod(source.get("defaultMode", 0o644))
            path = mount["mountPath"]
            if "subPath" in mount:
                yield f"touch {path}; mount --bind {target}/{mount['subPath']} {path}\n"
            else:
                yield f"mkdir -p {path}; mount --bind {target} {path}\n"

    def _watch(self) -> None:
        """Note every connection between two pods, twice a second, until `down`."""
        components = {self.address(component): component for component in ORDER}
        while not self._ended.wait(0.5):
            for component in ORDER:
                listening = {_end(line.split()[3])[1] for line in self.inside(component, "ss", "-tlnH").stdout.splitlines()}
                for line in self.inside(component, "ss", "-tnH").stdout.splitlines():
                    (_, port), (peer_host, _) = map(_end, line.split()[3:5])
                    peer = components.get(peer_host, component)
                    if port in listening and peer != component:
                        self.flows.add((peer, component, port))

    def _pids(self, component: str) -> list[int]:
        done = subprocess.run(("ip", "netns", "pids", f"shoal-{component}"), capture_output=True, text=True, check=False)
        return [int(pid) for pid in done.stdout.split()]


def until(holds: Callable[[], Any], limit_s: float) -> None:
    """Wait for it. Raises TimeoutError."""
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit_s:g} s")
        time.sleep(1.0)


def _end(text: str) -> tuple[str, int]:
    """Host and port of one end of a socket, as `ss` writes it."""
    host, _, port = text.rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port)


def _within(component: str, *command: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", f"shoal-{component}", *command)


def _ip(*lines: str) -> None:
    for line in lines:
        subprocess.run(["ip", *line.split()], check=True, capture_output=True)
