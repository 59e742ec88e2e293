"""How the two ends of a pair find each other: through the control stream that has just proved both to be members.

torch's process groups meet through a `Store`. Each end has one of its own, in memory: what it sets goes to the peer as a
`Rendezvous` message, and what the peer set comes the same way. So nothing listens for a rendezvous, and nobody else takes part.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import Store

from shoal.errors import InternalError, ShoalError, Unavailable

MAX_KEY_CHARACTERS: Final = 256
MAX_VALUE_BYTES: Final = 4096  # Gloo's address takes 170, NCCL's id 128
MAX_KEYS: Final = 64  # that the peer has set and nobody has deleted


class PairStore(Store):
    """One end's store. torch calls it on the pair's threads; `tell(key, value)` may be called on any of them.

    Keep it as long as the group made with it: torch's own reference does not keep a Python object alive.
    """

    def __init__(self, tell: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._tell = tell
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._error: ShoalError | None = None

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value and tell the peer."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = data
            self._changed.notify_all()
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        """Either end's value, once it is there. Raises Unavailable."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns when either end has set every key. Raises Unavailable after the timeout, or once the pair has closed."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._error or all(key in self._values for key in keys), timeout_s)
            if self._error is not None:
                raise Unavailable(f"the pair closed while its ends were meeting: {self._error}")
            if not self.check(keys):
                raise Unavailable(f"the peer did not come to the pair within {timeout_s:g} s")

    def check(self, keys: list[str]) -> bool:
        """Whether every key is there now."""
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Forget a value at this end. False when there was none."""
        return self._values.pop(key, None) is not None

    def heard(self, key: str, value: bytes) -> None:
        """The peer has set a value. Raises InternalError for what no group sets: an empty address would crash Gloo."""
        if not (0 < len(key) <= MAX_KEY_CHARACTERS and 0 < len(value) <= MAX_VALUE_BYTES):
            raise InternalError(f"a rendezvous of {len(key)} characters and {len(value)} bytes cannot be right")
        with self._changed:
            if key not in self._values and len(self._values) >= MAX_KEYS:
                raise InternalError(f"the peer has set more than {MAX_KEYS} keys for one pair")
            self._values[key] = value
            self._changed.notify_all()

    def close(self, error: ShoalError) -> None:
        """The pair is gone: whoever waits hears it now."""
        with self._changed:
            self._error = error
            self._changed.notify_all()


def twin_stores(timeout_s: float) -> tuple[PairStore, PairStore]:
    """Both ends' stores within one process, for trying a back end."""
    first = PairStore(lambda key, value: second.heard(key, value), timeout_s)
    second = PairStore(first.heard, timeout_s)
    return first, second


def first_line(error: BaseException) -> str:
    """torch's errors carry stack traces; their first line says it."""
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
