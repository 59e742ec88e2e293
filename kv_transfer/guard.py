"""What stands between a transfer's thread and blocks that may be freed: one copy at a time, and none after the end."""

import threading
from collections.abc import Callable, Sequence

import torch

from shoal.errors import InternalError
from shoal.kv_transfer.checksum import checksum
from shoal.placement.plan import Entry


class Guard:
    """Keeps a source or sink from being touched once its owner may free the blocks. Thread-safe.

    `close` waits for the call in progress (one entry's copy), so that after it returns no call runs or will start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False

    def call(self, function: Callable[[], None]) -> bool:
        """Run `function` unless closed; False when closed. An exception it raises becomes InternalError."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                function()
            except Exception as error:
                raise InternalError(f"copying KV failed: {type(error).__name__}: {error}") from error
            return True

    def copy(
        self, copy: Callable[[Entry, torch.Tensor], None], entries: Sequence[Entry], message: torch.Tensor
    ) -> list[int] | None:
        """Copy entries to or from a message [num_bytes] uint8, one behind the other. None when closed, else their checksums."""
        crcs: list[int] = []
        first = 0
        for entry in entries:
            part = message[first : first + entry.num_bytes]
            first += entry.num_bytes
            if not self.call(lambda entry=entry, part=part: copy(entry, part)):  # type: ignore[misc]
                return None
            crcs.append(checksum(part))
        return crcs

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
