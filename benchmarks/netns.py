"""Network namespaces of our own (Linux, root, `ip`, `tc`): who lives where, links cut and links of a given rate. Knows no worker.

Each place is a namespace with one interface; another namespace in their midst, the hub, forwards between them. Addresses of
10.213.0.0/16 exist only inside; nothing leads out.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000
_LATENCY = "400ms"  # how much a shaped link queues before it drops


class CannotShape(Exception):
    """The kernel has no token bucket; the text says so."""


def missing() -> str:
    """Why namespaces cannot be made here; "" when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    name = f"shoal-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this machine lets nobody make network namespaces"
    veth = ["ip", "-n", name, "link", "add", "name", "eth0", "type", "veth", "peer", "name", "eth1"]
    made = subprocess.run(veth, capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return "" if made else "this machine's kernel has no veth"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Net:
    """Namespaces named after this process."""

    def __init__(self, places: Sequence[str]) -> None:
        self._prefix, self._places = f"shoal-{os.getpid()}", tuple(places)
        self.addresses = {place: f"10.213.{index}.2" for index, place in enumerate(self._places)}

    def name(self, place: str) -> str:
        return f"{self._prefix}-{place}"

    def make(self) -> None:
        ip("netns", "add", self.name("hub"))
        for index, place in enumerate(self._places):
            inside, hub = self.name(place), self.name("hub")
            ip("netns", "add", inside)
            ip("-n", inside, "link", "add", "name", "eth0", "type", "veth", "peer", "name", f"hub{index}", "netns", hub)
            for where, device, host in ((inside, "eth0", 2), (hub, f"hub{index}", 1)):
                ip("-n", where, "address", "add", f"10.213.{index}.{host}/30", "dev", device)
                ip("-n", where, "link", "set", device, "up")
            ip("-n", inside, "link", "set", "lo", "up")
            ip("-n", inside, "route", "add", "default", "via", f"10.213.{index}.1")
        ip("netns", "exec", self.name("hub"), "sysctl", "-qw", "net.ipv4.ip_forward=1")

    def remove(self) -> None:
        for place in ("hub", *self._places):
            subprocess.run(["ip", "netns", "del", self.name(place)], check=False, capture_output=True)

    def command(self, place: str, *arguments: str) -> tuple[str, ...]:
        """A command line that runs there."""
        return ("ip", "netns", "exec", self.name(place), *arguments)

    def enter(self, place: str) -> None:
        """Move this process's only thread there."""
        with open(f"/run/netns/{self.name(place)}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    @contextmanager
    def cut(self, one: str, other: str) -> Iterator[None]:
        """Nothing passes between the two, and neither is told."""
        rules = [("from", self.addresses[a], "to", self.addresses[b], "blackhole") for a, b in ((one, other), (other, one))]
        for rule in rules:
            ip("-n", self.name("hub"), "rule", "add", "pref", "10", *rule)
        try:
            yield
        finally:
            for rule in rules:
                ip("-n", self.name("hub"), "rule", "del", "pref", "10", *rule)

    def shape(self, place: str, bits_per_s: float | None) -> None:
        """Let what leaves a place pass a token bucket (tc's tbf) of this rate; None: no limit. Raises CannotShape."""
        tc = ("tc", "-n", self.name(place), "qdisc")
        if bits_per_s is None:
            subprocess.run([*tc, "del", "dev", "eth0", "root"], check=False, capture_output=True)
            return
        burst = max(128 << 10, int(bits_per_s / 8 * 0.001))  # a millisecond, and room for one segment of 64 KiB
        bucket = ("tbf", "rate", f"{bits_per_s:.0f}bit", "burst", str(burst), "latency", _LATENCY)
        done = subprocess.run([*tc, "replace", "dev", "eth0", "root", *bucket], check=False, capture_output=True, text=True)
        if done.returncode:
            raise CannotShape(f"tc cannot shape a link here: {done.stderr.strip()}")

    def bytes_moved(self, place: str) -> tuple[int, int]:
        """What a place has sent and received so far, headers of every layer included."""
        files = [f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("tx", "rx")]
        told = subprocess.run(self.command(place, "cat", *files), check=True, capture_output=True, text=True).stdout.split()
        return int(told[0]), int(told[1])
