"""Whose request this is, and whether its tenant may begin another. Knows tokens' hashes and limits; knows no transport.

Limits hold for each router by itself. A request is counted where the service begins it, so that a batch over HTTP counts once
for each of its prompts.
"""

import hmac
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Final

from shoal.config.tokens import TokenEntry, hash_token, read_tokens
from shoal.errors import CapacityExceeded, InvalidConfig, Unauthenticated
from shoal.router.instruments import LIMITED, TENANT_REQUESTS
from shoal.types import Priority, Turn

_log = logging.getLogger(__name__)
_WINDOW_S: Final = 60.0
_LOOK_S: Final = 1.0  # how soon a changed tokens file is noticed
_MAX_TOKEN: Final = 512  # characters


class Tenant:
    """What one tenant has running, and began within the last minute."""

    def __init__(self, entry: TokenEntry, clock: Callable[[], float] = time.monotonic) -> None:
        self.entry = entry
        self.num_running = 0
        self._clock = clock
        self._begun: deque[float] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        """While a request runs. Raises CapacityExceeded beyond the tenant's limits."""
        entry, now = self.entry, self._clock()
        while self._begun and self._begun[0] <= now - _WINDOW_S:
            self._begun.popleft()
        if entry.max_concurrent and self.num_running >= entry.max_concurrent:
            LIMITED.labels(entry.tenant, "max_concurrent").inc()
            raise CapacityExceeded(
                f"tenant {entry.tenant} has its limit of {entry.max_concurrent} requests running; wait for one to end", 1.0
            )
        if entry.requests_per_minute and len(self._begun) >= entry.requests_per_minute:
            LIMITED.labels(entry.tenant, "requests_per_minute").inc()
            wait_s = self._begun[-entry.requests_per_minute] + _WINDOW_S - now
            raise CapacityExceeded(
                f"tenant {entry.tenant} has used its {entry.requests_per_minute} requests a minute; retry in {wait_s:.0f} s",
                wait_s,
            )
        if entry.requests_per_minute:
            self._begun.append(now)
        self.num_running += 1
        TENANT_REQUESTS.labels(entry.tenant).inc()
        try:
            yield
        finally:
            self.num_running -= 1


CURRENT: Final[ContextVar[Tenant | None]] = ContextVar("tenant", default=None)  # of the call that is being answered


def tenant_name() -> str:
    """Whose call is being answered; "" where no tokens are asked for."""
    tenant = CURRENT.get()
    return "" if tenant is None else tenant.entry.tenant


def turn_of(text: str) -> tuple[Turn, tuple[str, ...]]:
    """The turn of the call that is being answered, and what is declared where its tenant may not go so high.

    Raises InvalidRequest for a priority that is none.
    """
    wanted, tenant = Priority.parse(text), CURRENT.get()
    if tenant is None:
        return Turn(wanted), ()
    ceiling = tenant.entry.max_priority
    if wanted.rank <= ceiling.rank:
        return Turn(wanted, tenant.entry.tenant), ()
    return Turn(ceiling, tenant.entry.tenant), (f"priority {wanted} was lowered to {ceiling}, the most that the tenant may ask",)


def within_limits() -> AbstractContextManager[None]:
    """While the current tenant's request runs. Entering it raises CapacityExceeded."""
    tenant = CURRENT.get()
    return nullcontext() if tenant is None else tenant.running()


class TokenBook:
    """The tokens file in force. A changed file is taken within a second; a broken one is refused and the last kept."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InvalidConfig when the file cannot be used."""
        self._path, self._clock = Path(path), clock
        self._entries: tuple[TokenEntry, ...] = ()
        self._tenants: dict[str, Tenant] = {}
        self._signature = self._stat()
        self._looked_at = clock()
        self._take(read_tokens(self._path))

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an `authorization` header. Raises Unauthenticated.

        Hashes are compared with all entries, in constant time each: how long it takes tells nothing of what is near.
        """
        self._refresh()
        scheme, _, token = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated("this server asks for a token: send it as `authorization: Bearer TOKEN`")
        given = hash_token(token.strip()) if len(token) <= _MAX_TOKEN else ""
        found: TokenEntry | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.sha256, given):
                found = entry
        if found is None:
            raise Unauthenticated("the token is not valid here; ask the operator for one")
        return self._tenants[found.tenant]

    def _refresh(self) -> None:
        if (now := self._clock()) < self._looked_at + _LOOK_S:
            return
        self._looked_at = now
        try:
            if (signature := self._stat()) != self._signature:
                self._signature = signature
                self._take(read_tokens(self._path))
                _log.info("took the changed tokens file")
        except InvalidConfig as error:
            _log.error("keeping the last tokens: %s", error)

    def _stat(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError as error:
            raise InvalidConfig(f"cannot read the tokens file {self._path}: {error.strerror}; `shoal token` makes one") from None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _take(self, entries: tuple[TokenEntry, ...]) -> None:
        self._entries = entries
        tenants = {}
        for entry in entries:
            tenant = self._tenants.get(entry.tenant) or Tenant(entry, self._clock)
            tenant.entry = entry  # the limits may have changed; what runs still counts
            tenants[entry.tenant] = tenant
        self._tenants = tenants
