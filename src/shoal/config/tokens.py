"""The tokens file: which tenants may call a router, by the hashes of their tokens, and how much each may ask. Knows no call."""

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from shoal.errors import InvalidConfig
from shoal.types import Priority

TENANT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,63}")
_KEYS: Final = ("tenant", "sha256", "max_concurrent", "requests_per_minute", "max_priority")


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of a tenant. Raises InvalidConfig. The hash needs no salt: a token is 256 random bits, nothing to be guessed."""

    tenant: str
    sha256: str  # 64 hex digits
    max_concurrent: int = 0  # requests running at once; 0: no limit
    requests_per_minute: int = 0  # begun within any 60 s; 0: no limit
    max_priority: Priority = Priority.NORMAL  # a request that asks for more is lowered to it

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str) or TENANT_NAME.fullmatch(self.tenant) is None:
            raise InvalidConfig(f"tenant must be 1 to 64 letters, digits, '.', '_' or '-', not {self.tenant!r}")
        if not isinstance(self.sha256, str) or re.fullmatch(r"[0-9a-f]{64}", self.sha256) is None:
            raise InvalidConfig(f"{self.tenant}: sha256 must be 64 lower-case hex digits in quotes, as `shoal token` writes them")
        for name in ("max_concurrent", "requests_per_minute"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= 1_000_000:
                raise InvalidConfig(f"{self.tenant}: {name} must be a whole number in 0…1,000,000 (0: no limit), not {value!r}")
        if self.max_priority not in tuple(Priority):
            raise InvalidConfig(f"{self.tenant}: max_priority must be {', '.join(Priority)}, not {self.max_priority!r}")
        object.__setattr__(self, "max_priority", Priority(self.max_priority))  # a file holds its name

    def to_yaml(self) -> str:
        """As it stands in the file."""
        lines = [f"- tenant: {self.tenant}", f'  sha256: "{self.sha256}"']
        for name in ("max_concurrent", "requests_per_minute"):
            lines += [f"  {name}: {value}"] if (value := getattr(self, name)) else []
        lines += [f"  max_priority: {self.max_priority}"] if self.max_priority is not Priority.NORMAL else []
        return "\n".join(lines) + "\n"


def new_token() -> str:
    """256 random bits, marked as ours so that scanners for leaked secrets can find it."""
    return "shoal_" + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """What is kept of it."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_tokens(path: str | Path) -> tuple[TokenEntry, ...]:
    """Every entry of a file. Raises InvalidConfig that names the entry: a router must not start with half of its tenants."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"cannot read the tokens file {path}: {error.strerror}; `shoal token` makes one") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise InvalidConfig(f"the tokens file {path} is not YAML") from None  # its text stays out of the message
    if not isinstance(values, list) or not values:
        raise InvalidConfig(f"the tokens file {path} must list at least one entry, as `shoal token` writes them")
    entries = tuple(_entry(f"{path}, entry {number}", value) for number, value in enumerate(values, 1))
    limits: dict[str, tuple[int, int, Priority]] = {}
    hashes = set()
    for entry in entries:
        own = (entry.max_concurrent, entry.requests_per_minute, entry.max_priority)
        if limits.setdefault(entry.tenant, own) != own:
            raise InvalidConfig(f"{path}: the entries of tenant {entry.tenant} have different limits; make them equal")
        if entry.sha256 in hashes:
            raise InvalidConfig(f"{path}: the same token stands there twice, the second time for tenant {entry.tenant}")
        hashes.add(entry.sha256)
    return entries


def _entry(where: str, value: Any) -> TokenEntry:
    if not isinstance(value, Mapping):
        raise InvalidConfig(f"{where} must be a mapping with tenant and sha256")
    if unknown := [str(key) for key in value if key not in _KEYS]:
        raise InvalidConfig(f"{where} has unknown keys {', '.join(unknown)}; known: {', '.join(_KEYS)}")
    if missing := [key for key in _KEYS[:2] if key not in value]:
        raise InvalidConfig(f"{where} lacks {', '.join(missing)}")
    try:
        return TokenEntry(**value)
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}: {error}") from None
