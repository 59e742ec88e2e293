"""Named points at which a test may delay, drop, damage, raise, stop or kill. Does nothing unless asked to.

Points around control messages are `before-<message>` and `after-<message>` on the end that writes it and `on-<message>` on the
end that reads it (hello, welcome, rendezvous, open, accept, reject, ready, go, skip, trailer, ack, end, heartbeat). Points around
the work of a message: `before-pack`, `after-pack`, `before-send`, `mid-send`, `after-send` at prefill; `before-post`,
`after-post`, `after-receive`, `after-unpack` at decode. `raise` suits the `before-` points, `corrupt` suits `before-send`.
"""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import InvalidConfig, Unavailable

VARIABLE = "SHOAL_FAULTS"
_ACTIONS = ("delay", "drop", "corrupt", "raise", "stop", "kill")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at a point: from its hit number `skip` (0 = the first) on, each `every`-th, `times` times (None = always)."""

    action: str
    skip: int = 0
    every: int = 1
    times: int | None = 1
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise InvalidConfig(f"fault action {self.action!r} is unknown; choose one of {', '.join(_ACTIONS)}")
        if self.every < 1:
            raise InvalidConfig("a fault's `every` must be at least 1")


class Faults:
    """Counts hits per point. Thread-safe."""

    def __init__(self, faults: Mapping[str, Fault] | None = None) -> None:
        self._faults = dict(faults or {})
        self._num_hits: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, *, allowed: bool) -> "Faults":
        """Read SHOAL_FAULTS, JSON {point: {action, skip, every, times, delay_s}}. Raises InvalidConfig if it may not be set."""
        text = os.environ.get(VARIABLE)
        if not text:
            return cls()
        if not allowed:
            raise InvalidConfig(f"{VARIABLE} is set, but fault injection is off: unset it, or start with --chaos")
        try:
            return cls({point: Fault(**fault) for point, fault in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidConfig(f"{VARIABLE} cannot be read: {error}") from None

    def hit(self, point: str) -> bool:
        """Pass a point from a thread. True means: drop (or damage) what was about to happen. Raises Unavailable when told to."""
        fault = self._due(point)
        if fault is None:
            return False
        if fault.action == "delay":
            time.sleep(fault.delay_s)
        return _carry_out(fault, point)

    async def reach(self, point: str) -> bool:
        """Pass a point from the event loop; otherwise as `hit`."""
        fault = self._due(point)
        if fault is None:
            return False
        if fault.action == "delay":
            await asyncio.sleep(fault.delay_s)
        return _carry_out(fault, point)

    def _due(self, point: str) -> Fault | None:
        fault = self._faults.get(point)
        if fault is None:
            return None
        with self._lock:
            hits = self._num_hits[point] = self._num_hits.get(point, 0) + 1
        turn, rest = divmod(hits - 1 - fault.skip, fault.every)
        return fault if turn >= 0 and rest == 0 and (fault.times is None or turn < fault.times) else None


def _carry_out(fault: Fault, point: str) -> bool:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.action == "raise":
        raise Unavailable(f"fault injected at {point}")
    return fault.action in ("drop", "corrupt")
