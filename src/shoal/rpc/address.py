"""Reads `host:port`. Knows what an address looks like and which hosts mean every interface; opens nothing."""

from dataclasses import dataclass
from typing import Final, Self

from shoal.errors import InvalidConfig

_WILDCARDS: Final = ("", "*", "0.0.0.0", "::", "0")


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen or to call. Port 0 lets the system choose one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, what: str = "address") -> Self:
        """Parse `127.0.0.1:50051` or `[::1]:50051`. Raises InvalidConfig that shows the expected form."""
        host, colon, port = text.strip().rpartition(":")
        if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise InvalidConfig(f"{what} {text!r} must be host:port with a port of 0…65535, as in 127.0.0.1:50051")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise InvalidConfig(f"{what} {text!r}: write an IPv6 host in brackets, as in [::1]:50051")
        return cls(host, int(port))

    @property
    def is_wildcard(self) -> bool:
        """Whether the host means every interface of the machine."""
        return self.host in _WILDCARDS

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
