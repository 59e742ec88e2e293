"""The store in which the two ends of a pair find each other. Knows interfaces and prefixes; knows no messages of the pair.

torch's TCPStore listens on every interface, whatever host it is given, and asks nobody for a password. So the decode worker
binds a socket itself and hands it over, and each pair lives under a random prefix that only the control stream tells.
"""

import secrets
import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shoal.errors import InvalidConfig, Unavailable


class StoreServer:
    """The decode worker's one store. Raises InvalidConfig when `host` cannot be bound."""

    def __init__(self, host: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
        except OSError as error:
            listener.close()
            raise InvalidConfig(
                f"transfer.host {host!r} cannot be bound: {error.strerror}; name an address of this machine"
            ) from None
        listener.listen(128)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )

    @staticmethod
    def new_prefix() -> str:
        """A pair's epoch: unguessable, used once."""
        return secrets.token_hex(16)

    def forget(self, prefix: str) -> None:
        """Delete what a pair left behind."""
        for key in self._store.list_keys():
            if key.startswith(prefix):
                self._store.delete_key(key)


def connect_store(host: str, port: int, prefix: str, timeout_s: float) -> Store:
    """A connection of the pair's own: a waiting client holds its lock, so pairs never share one. Raises Unavailable."""
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise Unavailable(f"the decode worker's store at {host}:{port} did not answer: {first_line(error)}") from error
    return PrefixStore(prefix, store)


def first_line(error: BaseException) -> str:
    """torch's errors carry stack traces; their first line says it."""
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
