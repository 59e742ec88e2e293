"""A Ray node of this process's own: it offers nothing and runs nothing. Knows `ray start`; knows no actor.

A Ray driver needs a node on its own machine. Where the cluster's nodes are elsewhere (other pods, other hosts), the controller
brings one without CPUs and GPUs, as a child that ends with it.
"""

import logging
import os
import socket
import subprocess
import sys
import time
from typing import Self

from shoal.controller.descendants import die_with_parent
from shoal.errors import Unavailable
from shoal.rpc import Address

_log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum; nothing of ours goes through it
_RETRY_S = 1.0
_END_S = 10.0


class OwnNode:
    """A running `ray start --block`. Linux: it gets SIGTERM when the thread that started it ends."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child

    @classmethod
    def join(cls, address: str, host: str, wait_s: float) -> Self:
        """Start a node at `host`, an address of ours, once the head at `address` is reachable. It may not have joined yet.

        Raises Unavailable when nothing listens there within `wait_s`, InvalidConfig for an address that cannot be read.
        """
        _wait_for(Address.parse(address, "ray_address"), wait_s)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [f"--address={address}", f"--node-ip-address={host}", "--num-cpus=0", "--num-gpus=0"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,  # Ctrl-C is for us
            preexec_fn=die_with_parent,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        )
        _log.info("a Ray node of our own joins %s as %s", address, host)
        return cls(child)

    @property
    def end(self) -> str:
        """How it ended, in words; "" while it runs."""
        status = self._child.poll()
        return "" if status is None else f"the controller's own Ray node ended with status {status}; its log is above"

    def leave(self) -> None:
        """End it; Ray's head is told by the node itself."""
        self._child.terminate()
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _wait_for(head: Address, wait_s: float) -> None:
    """Return once something listens there. Raises Unavailable."""
    until = time.monotonic() + wait_s
    told = False
    while True:
        try:
            socket.create_connection((head.host, head.port), timeout=3.0).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                words = error.strerror or str(error)
                raise Unavailable(
                    f"no Ray head at {head} after {wait_s:g} s ({words}); start it, or correct ray_address"
                ) from None
            if not told:
                _log.info("waiting for a Ray head at %s", head)
                told = True
        time.sleep(_RETRY_S)
